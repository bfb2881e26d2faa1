"""Cascades: questions to several models about one image, of which later ones are about parts that earlier ones have found."""
