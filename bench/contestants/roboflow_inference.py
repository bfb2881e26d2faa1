"""Roboflow's inference server, as its container starts it. The arguments are the port and a folder with packages of models."""

import os
import sys
from pathlib import Path

import uvicorn  # type: ignore[import-not-found]
from inference.core.interfaces.http.http_api import HttpInterface  # type: ignore[import-not-found]
from inference.core.managers.base import ModelManager  # type: ignore[import-not-found]
from inference.core.registries.roboflow import RoboflowModelRegistry  # type: ignore[import-not-found]
from inference.models.utils import ROBOFLOW_MODEL_TYPES  # type: ignore[import-not-found]

if __name__ == "__main__":
    os.chdir(sys.argv[2])  # a model's name is a path
    for name in ("static", "_next/static"):  # it serves the files of its repository
        Path("inference/landing/out", name).mkdir(parents=True)
    interface = HttpInterface(ModelManager(RoboflowModelRegistry(ROBOFLOW_MODEL_TYPES)))
    uvicorn.run(interface.app, port=int(sys.argv[1]), access_log=False)
