"""Write the documents of the RAG sample: topics of the language reference that every CPython ships.

python deploy/local/make_topics.py OUT
"""

import sys
from pathlib import Path
from pydoc_data.topics import topics

NAMES = """
assert assignment class exceptions for function global identifiers if import lambda naming nonlocal raise return
slicings subscriptions try typesseq-mutable while
"""


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name in NAMES.split():
        target, text = out / f"{name}.txt", topics[name]
        if not target.exists() or target.read_text() != text:
            target.write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
