"""Servers that several tests share, and transformers' own greedy answers as the reference."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.running import DEMO, RunningServer

NAMES = """
    os.path.join os.path.split os.getcwd os.listdir os.makedirs json.dumps json.loads re.compile re.sub
    math.sqrt math.gcd shutil.copytree shutil.rmtree random.shuffle random.choice textwrap.dedent
    itertools.chain functools.partial functools.reduce collections.Counter heapq.heappush bisect.insort
    string.capwords socket.create_connection urllib.parse.quote hashlib.new tempfile.mkdtemp time.sleep
    glob.glob inspect.getsource
"""
CODE = (
    "def read(self, size=-1):\n    ",
    "import os\nimport sys\n\n",
    "class Queue:\n    def __init__(self, maxsize=0):\n",
    "for line in file:\n",
    "try:\n    import ",
    'if __name__ == "__main__":\n',
    "raise ValueError(",
    "with open(filename) as ",
    "return [x for x in ",
    "# This module ",
    '"""A collection of ',
    "@property\ndef name(self):\n",
    "self.assertEqual(",
    "while True:\n    data = ",
    "async def main():\n",
    "lambda x: ",
    "def __repr__(self):\n    return ",
    "print(",
    "x = {",
    "from collections import ",
)
PROMPTS = [f"Q: What does {name} do?\nA:" for name in NAMES.split()] + list(CODE)
MAX_TOKENS = 12


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    assert len(set(PROMPTS)) == 50
    return PROMPTS


@pytest.fixture(scope="session")
def expected(prompts) -> list[str]:
    """transformers' greedy continuation of each prompt by itself, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)  # servers run beside it
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    texts = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
            out = model.generate(**ids, max_new_tokens=MAX_TOKENS, do_sample=False)
            texts.append(tokenizer.decode(out[0, ids.input_ids.shape[1] :], skip_special_tokens=True))
    return texts


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder whose modules are named as the standard library's, torch's and ours, and leave a trace when they run."""
    folder = tmp_path_factory.mktemp("foreign")
    trace = folder / "it-ran"
    code = f"open({str(trace)!r}, 'a').write(__file__ + chr(10))\nraise SystemExit('foreign code')\n"
    for name in ("json", "logging", "ctypes", "torch", "numpy", "sitecustomize", "transformers", "oarlock"):
        (folder / f"{name}.py").write_text(code)
    for name in ("server", "engine", "workers", "base"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(code)
    yield folder
    assert not trace.exists(), trace.read_text()


@pytest.fixture(scope="session")
def tp1():
    """Server with one rank, float32, and prefix caching in small blocks, so that short prompts share some."""
    flags = ("--dtype", "float32", "--block-size", 8, "--served-model-name", "demo", "alias")
    with RunningServer(DEMO, *flags) as server:
        yield server


@pytest.fixture(scope="session")
def tp2(foreign):
    """Server like `tp1` with two ranks, started in a folder that nothing may be imported from."""
    flags = ("--dtype", "float32", "--block-size", 8, "--served-model-name", "demo", "-tp", 2)
    with RunningServer(DEMO, *flags, cwd=foreign) as server:
        yield server
