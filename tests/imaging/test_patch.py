"""What is cut out of an image for a model."""

import numpy as np

from app.imaging.patch import Patch
from app.model.spec import from_triton_config

WANTED = np.array([[0.3, 0.3], [0.7, 0.3], [0.5, 0.5], [0.35, 0.7], [0.65, 0.7]])
CONFIG = {
    "name": "describes",
    "input": [{"name": "image", "data_type": "TYPE_UINT8", "dims": [1, 100, 100, 3]}],
    "output": [{"name": "embedding", "data_type": "TYPE_FP32", "dims": [1, 4]}],
    "parameters": {"task": {"string_value": "embedding"}, "landmarks": {"string_value": ",".join(map(str, WANTED.ravel()))}},
}


def test_a_turned_object_lies_where_the_model_wants_it() -> None:
    spec = from_triton_config(CONFIG, "1")
    for angle, scale, middle in ((0.5, 60, (110, 90)), (-2.5, 250, (120, 100)), (0, 80, (10, 100))):
        cosine, sine = scale * np.cos(angle), scale * np.sin(angle)
        landmarks = (WANTED - 0.5) @ np.array([[cosine, sine], [-sine, cosine]]) + middle
        x, y = np.meshgrid(np.arange(200), np.arange(180))
        places = np.stack([x, y, np.zeros_like(x)], axis=-1).astype(np.uint8)  # each pixel tells where it is

        cut = Patch(places, landmarks=landmarks.astype(np.float32)).cut(spec)

        assert cut.shape == (100, 100, 3)
        for place, landmark in zip((WANTED * 100).astype(int), landmarks, strict=True):
            inside = (landmark >= 0).all() and (landmark < (200, 180)).all()
            expected = landmark if inside else (0, 0)
            assert np.abs(cut[place[1], place[0], :2] - expected).max() <= max(2.0, scale / 100), (angle, place)


def test_straightened_line_is_at_most_as_large_as_a_page() -> None:
    spec = from_triton_config(CONFIG, "1")
    image = np.zeros((2400, 3000, 3), np.uint8)
    image[:1200, :1500] = 200
    for corners in ([[0, 0], [3000, 0], [3000, 2400], [0, 2400]], [[0, 0], [9e6, 0], [9e6, 2400], [0, 2400]]):
        cut = Patch(image, corners=np.array(corners, np.float32)).cut(spec)

        height, width = cut.shape[:2]
        assert 3_900_000 < height * width <= 4_000_000
        assert cut[height // 4, 0].tolist() == [200] * 3
        assert cut[3 * height // 4, 0].tolist() == [0] * 3
