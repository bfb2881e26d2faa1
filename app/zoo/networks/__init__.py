"""Networks of models that `pull` knows, built from what is published: their weights, or an ONNX file that Triton cannot use.

They are here only because no package registry has them as ONNX ready to use. A user's network is an ONNX file: `nereid add
https://... --sha256 ...`.
"""
