"""label-studio-sdk: a project of uploaded pictures with an ML backend; prints what Label Studio has of both.

Arguments: the address of Label Studio, a token, the settings of the backend as JSON, a labeling configuration, pictures.
"""

import json
import sys
from pathlib import Path

import httpx
from label_studio_sdk import LabelStudio

address, token, backend, config, *pictures = sys.argv[1:]
client = LabelStudio(base_url=address, api_key=token)
is_personal = token.startswith("eyJ")
authorization = f"Bearer {client.tokens.refresh(refresh=token).access}" if is_personal else f"Token {token}"
project = client.projects.create(title="Nereid", label_config=Path(config).read_text(encoding="utf-8"))
for picture in map(Path, pictures):  # the SDK does not upload files
    httpx.post(
        f"{address}/api/projects/{project.id}/import",
        headers={"Authorization": authorization},
        files={"file": (picture.name, picture.read_bytes())},
        timeout=60,
    ).raise_for_status()
ml = client.ml.create(project=project.id, is_interactive=True, **json.loads(backend))
tasks = list(client.tasks.list(project=project.id, fields="all"))
opened = client.tasks.get(tasks[0].id)
client.actions.create(project=project.id, id="retrieve_tasks_predictions")
client.ml.train(ml.id)
interactive = client.ml.with_raw_response.predict_interactive(ml.id, task=tasks[0].id)
print(
    json.dumps(
        {
            "state": ml.readable_state,
            "model_version": ml.model_version,
            "versions": client.ml.list_model_versions(ml.id).model_dump(exclude_none=True),
            "images": [task.data["image"] for task in tasks],
            "opened": len(opened.predictions),
            "predictions": [[p.result for p in client.predictions.list(task=task.id)] for task in tasks],
            "interactive": interactive._response.json(),  # noqa: SLF001 - the SDK returns no answer
        }
    )
)
