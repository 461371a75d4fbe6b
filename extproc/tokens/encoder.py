"""From a prompt to block hashes: what was read before is not read again."""

from __future__ import annotations

from itertools import count

import msgspec
from xxhash import xxh3_128_digest

from extproc.core.blocks import TOKEN_BYTES, Mark, beginning, extend
from extproc.core.prompt import Chat, Text
from extproc.core.types import Answered, Chain
from extproc.tokens.growth import Growth, weight
from extproc.tokens.memo import Entry, Memo
from extproc.tokens.tokenizer import Tokenizer

_SLICE_BYTES = 1 << 16
"""Of token ids hashed at a time: others that wait for the interpreter get it in between."""

_LONGEST_PIECE, _LONGEST_PIECE_SLOW = 1 << 17, 1 << 18
"""Of characters that a tokenizer takes in one step: more keep others from the interpreter for over 2 ms, or 5."""

_NUMBERS = count()
_CHECKED_FIRST = 32
_CHECKED_EVERY = 64


class Encoder:
    """One model's template, tokenizer and memo."""

    def __init__(self, tokenizer: Tokenizer, growth: Growth | None, memo: Memo) -> None:
        """`growth`: None for a model that no chat is had with."""
        self.tokenizer = tokenizer
        self.growth = growth
        self.memo = memo
        self.number = next(_NUMBERS)
        """What it remembers is its own: another template or tokenizer makes something else of the same prompt."""
        self.mismatches = 0
        """Continued conversations that were found to differ from what they are when read anew."""
        self._continued = 0
        self._text_bytes, self._text_tokens = float(TOKEN_BYTES), 1.0

    @property
    def bytes_per_token(self) -> float:
        """Of text, as seen so far; 4 before anything was."""
        return self._text_bytes / self._text_tokens

    def learn(self, text_bytes: int, tokens: int) -> None:
        """`tokens` came of so much text."""
        self._text_bytes, self._text_tokens = self._text_bytes + text_bytes, self._text_tokens + tokens

    def check(self, job: Job) -> bool:
        """Does a conversation that was continued have the hashes of one that is read anew? If not, none is continued
        any more. Costs a whole reading; for a thread of its own."""
        anew = Job(self, job.prompt, job.salt, job.sizes, remember=False)
        if anew.day != job.day:  # midnight has come between them
            return True
        try:
            anew.run()
            same = anew.chains() == job.chains()
        except ValueError:  # the window is rendered, the whole is refused
            same = False
        if not same:
            self.mismatches += 1
            if self.growth is not None:
                self.growth.sure = False
        return same

    def status(self) -> dict[str, object]:
        """For the health page."""
        return {
            "tokenizer": "fast" if self.tokenizer.fast else f"slow: {self.tokenizer.why_slow}",
            "doubt": self.tokenizer.doubt or None,
            "chat_template": self.growth is not None,
            "continues_conversations": self.growth is not None and self.growth.sure,
            "mismatches": self.mismatches,
            "bytes_per_token": round(self.bytes_per_token, 2),
        }

    def wants_check(self) -> bool:
        """Is it time to check a continued conversation? The first ones, and one in a while."""
        self._continued += 1
        return self._continued <= _CHECKED_FIRST or self._continued % _CHECKED_EVERY == 0


class Job:
    """One prompt on its way to block hashes: found in the memo at once, as far as it is there; the rest by `run`, once,
    in any thread. A conversation costs about 3 us a message to find."""

    def __init__(
        self, encoder: Encoder, prompt: Chat | Text, salt: int, sizes: tuple[int, ...], *, remember: bool = True
    ) -> None:
        self.prompt, self.salt, self.sizes = prompt, salt, sizes
        self.done = False
        self.short = False
        """There is a stretch that cannot be cut and is too long: what is hashed ends before it."""
        self.continued = False
        """Made of an earlier turn and what was new."""
        self.text_bytes = 0
        """About how much text it is."""
        self.fresh_bytes = 0
        """How much of that `run` will read."""
        self.encoder = encoder
        self.day = "" if encoder.growth is None else encoder.growth.day()
        self.weight = 0
        """How many messages, parts and calls `run` will render."""
        self._memo = encoder.memo if remember else None
        self._mark: Mark = beginning(salt, sizes)
        self._parts: list[tuple[Chain, ...]] = []
        self._keys: list[bytes] = []
        self._known = 0
        self._entry: Entry | None = None
        if isinstance(prompt, Chat):
            self._find(prompt)
        else:
            self._keys.append(xxh3_128_digest(self._root(prompt.add_special_tokens)))
            self.text_bytes = self.fresh_bytes = len(prompt.text.encode("utf-8", "surrogatepass"))
        self.turn: int | None = None
        """A name for the prompt, where what is answered to it can be found in the next turn's."""
        self.answered: Answered | None = None
        """What was answered to the turn before."""
        self._expected = self._mark.length / TOKEN_BYTES + self.fresh_bytes / encoder.bytes_per_token

    @property
    def tokens(self) -> int:
        """Of the prompt; an estimate until it is done."""
        return self._mark.length // TOKEN_BYTES if self.done and not self.short else int(self._expected)

    def chains(self) -> dict[int, Chain]:
        """The hashes so far, for each block size."""
        parts = list(self._parts)
        return {size: b"".join([part[i] for part in parts]) for i, size in enumerate(self.sizes)}

    def run(self, most_bytes: int | None = None) -> bool:
        """Read what is not known yet. False: that would be more text than `most_bytes`, and is still to be done.

        ValueError: the engine would refuse it, or the template cannot render it.
        """
        prompt = self.prompt
        if self._entry is None or not isinstance(prompt, Chat) or not self._continue(prompt, self._entry):
            self._entry, self.fresh_bytes = None, self.text_bytes
            if most_bytes is not None and self.text_bytes > most_bytes:
                return False  # to be continued by a thread
            if isinstance(prompt, Text):
                self._whole(prompt.text, special=prompt.add_special_tokens)
            else:
                self._anew(prompt)
        self.done = True
        return True

    def _root(self, special: bool) -> bytes:
        return msgspec.msgpack.encode((self.encoder.number, self.salt, self.sizes, special, self.day))

    def _find(self, chat: Chat) -> None:
        front = msgspec.json.encode((chat.tools, chat.options))
        key = xxh3_128_digest(self._root(chat.add_special_tokens) + front)
        keys, sizes = [key], [len(front)]
        for message in chat.messages:
            identity = b"".join(chat.identity(message))
            keys.append(key := xxh3_128_digest(key + identity))
            sizes.append(len(identity))
        self._keys = keys
        self.text_bytes = self.fresh_bytes = sum(sizes)
        if self._memo is not None and _continues(self.encoder, chat):
            for known in range(len(keys) - 1, 0, -1):
                if (entry := self._memo.get(keys[known])) is not None:
                    self._known, self._entry = known, entry
                    self._mark, self._parts = entry.mark, [entry.chains]
                    self.fresh_bytes = sum(sizes[known + 1 :])
                    break
        self.weight = weight(chat, self._known)

    def _continue(self, chat: Chat, entry: Entry) -> bool:
        growth = self.encoder.growth
        more = None if growth is None or not growth.sure else growth.more(chat, self._known)
        if more is None or more.behind != entry.behind:
            return False
        begin = 0
        if more.answer and entry.asked:
            self._encode(more.text[: more.answer])
            begin = more.answer
            # without the token before the fence, which ends an answer: engines do not compute the last one
            end = self._mark.length // TOKEN_BYTES - 1
            if end > entry.asked and not self.short:
                self.answered = Answered(_name(self._keys[self._known]), entry.asked, end)
        self._encode(more.text[begin : more.fence])
        self._end(chat, more.left, more.text[more.fence :])
        self.continued = True
        return True

    def _anew(self, chat: Chat) -> None:
        self._mark, self._parts = beginning(self.salt, self.sizes), []
        growth = self.encoder.growth
        if growth is None:
            raise ValueError("the model has no chat template")
        text = growth.whole(chat)
        more = growth.more(chat, len(chat.messages)) if _continues(self.encoder, chat) else None
        if more is not None and text.endswith(more.text):
            fence = len(text) - len(more.text)
            self._whole(text[:fence], special=chat.add_special_tokens, ends=False)
            self._end(chat, more.left, text[fence:])
        else:
            self._whole(text, special=chat.add_special_tokens)

    def _end(self, chat: Chat, behind: int, rest: str) -> None:
        """`rest` ends the prompt. Remember the conversation up to here, a fence: its next turn goes on from it."""
        mark, chains = self._mark, tuple(self.chains().values())
        self._encode(rest)
        if chat.add_special_tokens:
            self._add(self.encoder.tokenizer.end)
        if self.short:
            return
        asked = 0
        if chat.add_generation_prompt and self.encoder.growth is not None and self.encoder.growth.keeps_answers:
            self.turn, asked = _name(self._keys[-1]), self._mark.length // TOKEN_BYTES
        if self._memo is not None:
            self._memo.put(self._keys[-1], Entry(mark, chains, behind, asked))

    def _whole(self, text: str, *, special: bool, ends: bool = True) -> None:
        """Text from the start of the prompt, a piece at a time; what the memo has is not encoded again."""
        tokenizer, memo, key = self.encoder.tokenizer, self._memo, self._keys[0]
        if special:
            self._add(tokenizer.start)
        for piece in tokenizer.pieces(text):
            if self._too_long(piece):
                return
            data = piece.encode("utf-8", "surrogatepass")
            key = xxh3_128_digest(b"piece" + key + data)  # no message has that key, whatever it says
            entry = None if memo is None else memo.get(key)
            if entry is not None:
                self._mark = entry.mark
                self._parts.append(entry.chains)
                continue
            ids = tokenizer.encode(piece)
            before = len(self._parts)
            self._add(ids)
            self.encoder.learn(len(data), len(ids) // TOKEN_BYTES)
            if memo is not None:
                chains = tuple(b"".join(each) for each in zip(*self._parts[before:], strict=True))
                memo.put(key, Entry(self._mark, chains))
        if special and ends:
            self._add(tokenizer.end)

    def _encode(self, text: str) -> None:
        for piece in self.encoder.tokenizer.pieces(text):
            if self._too_long(piece):
                return
            self._add(self.encoder.tokenizer.encode(piece))

    def _too_long(self, piece: str) -> bool:
        """Nothing behind such a piece is hashed either."""
        longest = _LONGEST_PIECE if self.encoder.tokenizer.fast else _LONGEST_PIECE_SLOW
        self.short = self.short or len(piece) > longest
        return self.short

    def _add(self, ids: bytes) -> None:
        if self.short:
            return
        for at in range(0, len(ids), _SLICE_BYTES):
            mark, chains = extend(self._mark, ids[at : at + _SLICE_BYTES], self.sizes)
            # in this order: another thread may look in between, and more hashes than the mark says do no harm
            self._parts.append(chains)
            self._mark = mark


def _name(key: bytes) -> int:
    return int.from_bytes(key[:8])


def _continues(encoder: Encoder, chat: Chat) -> bool:
    growth = encoder.growth
    return growth is not None and growth.sure and not chat.continue_final_message
