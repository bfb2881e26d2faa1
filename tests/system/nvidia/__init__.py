"""NVIDIA's parser and compiler, in an environment of their own."""
