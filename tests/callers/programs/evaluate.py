"""pycocotools: a ground truth, results and a type of evaluation, as in docs/how-to/evaluate.md; prints the 12 statistics."""

import json
import sys
from pathlib import Path

from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

truth, found, kind = sys.argv[1:]
ground_truth = COCO(truth)
ids = ground_truth.getCatIds()
results = json.loads(Path(found).read_text())
for result in results:
    result["category_id"] = ids[result["category_id"]]
evaluation = COCOeval(ground_truth, ground_truth.loadRes(results), kind)
evaluation.evaluate()
evaluation.accumulate()
evaluation.summarize()
print(json.dumps(list(evaluation.stats)))
