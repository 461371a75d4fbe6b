"""The pure core: no I/O, no clock, no logging; `now` and `rng` are arguments."""
