"""RapidOCR, which reads the pictures of a folder in the order of their names, and prints its lines as JSON: one picture a line.

All lines that are not blank are there, whatever their score.
"""

import json
import sys
from pathlib import Path

from rapidocr import RapidOCR  # type: ignore[import-not-found]


def main(folder: str) -> None:
    """Read all pictures of a folder."""
    engine = RapidOCR(params={"Global.text_score": 0.0, "Global.log_level": "error"})
    for path in sorted(Path(folder).iterdir()):
        found = engine(str(path))
        lines = [] if found.boxes is None else zip(found.boxes.tolist(), found.txts, found.scores, strict=True)
        print(json.dumps([{"corners": corners, "text": text, "score": float(score)} for corners, text, score in lines]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
