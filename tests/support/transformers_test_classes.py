"""transformers' own test class of a model, ``ModelTesterMixin``, of the version that is installed.

It is part of transformers' source distribution, not of its wheel. ``python -m tests.support.transformers_test_classes``
downloads it from the package index, once; ``make setup`` does so.
"""

import importlib
import importlib.metadata
import re
import subprocess
import sys
import tarfile
import tempfile
import types
from pathlib import Path

VERSION = importlib.metadata.version("transformers")
FOLDER = Path(sys.prefix) / "share" / f"transformers-{VERSION}-tests"
PACKAGE = "transformers_tests"  # theirs is called tests, as ours
# What their file imports and the source distribution does not have: tests of exported models and of generation.
ABSENT = {"exporters.test_export": "ExportTesterMixin", "generation.test_utils": "GenerationTesterMixin"}


def download():
    """Put the tests of the source distribution into the environment, unless they are there."""
    if is_downloaded():
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation", "-d", folder]
        subprocess.run([*command, "--no-binary", "transformers", f"transformers=={VERSION}"], check=True)
        (archive,) = Path(folder).glob("*.tar.gz")
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive) as files:
            for member in files:
                where = Path(member.name)
                if where.parent.name == "tests" and where.suffix == ".py":
                    (FOLDER / where.name).write_bytes(files.extractfile(member).read())


def is_downloaded():
    return (FOLDER / "test_modeling_common.py").exists()


def load_model_tester(config):
    """The class. Its markers are made known to pytest's ``config``."""
    import transformers.testing_utils

    for path in (FOLDER / "test_modeling_common.py", Path(transformers.testing_utils.__file__)):
        for name in sorted(set(re.findall(r"\bmark\.(\w+)", path.read_text()))):
            config.addinivalue_line("markers", f"{name}: of transformers")
    if PACKAGE not in sys.modules:
        for name in ("", *{name.partition(".")[0] for name in ABSENT}, *ABSENT):
            module = types.ModuleType(f"{PACKAGE}.{name}".rstrip("."))
            module.__path__ = [str(FOLDER)] if not name else []
            sys.modules[module.__name__] = module
            if name in ABSENT:
                setattr(module, ABSENT[name], type(ABSENT[name], (), {}))
    return importlib.import_module(f"{PACKAGE}.test_modeling_common").ModelTesterMixin


if __name__ == "__main__":
    download()
