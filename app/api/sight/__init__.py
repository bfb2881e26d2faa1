"""POST /ocr/..., /analyze and the like: routes that ask a cascade of models about an image, or about several."""
