"""Several of vLLM's render servers, run by vLLM's own Python: it is imported once (7 s), then each has its process.

Arguments: DIRECTORY=PORT for each model, then vLLM's own options behind `--`. Ends when all have ended.
"""

import os
import sys

import vllm.entrypoints.cli.launch
import vllm.entrypoints.launchers.render.entry  # noqa: F401  the heavy part
from vllm.entrypoints.cli.main import main
from vllm.model_executor.models.registry import ModelRegistry

if __name__ == "__main__":
    # kept in vLLM's cache: else each would find it out by itself, in one more process that imports everything
    ModelRegistry.models["LlamaForCausalLM"].inspect_model_cls()
    split = sys.argv.index("--")
    children = []
    for served in sys.argv[1:split]:
        directory, _, port = served.rpartition("=")
        child = os.fork()
        if child == 0:
            sys.argv = ["vllm", "launch", "render", directory, "--port", port, *sys.argv[split + 1 :]]
            main()
            sys.exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
