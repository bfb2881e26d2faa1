"""The settings: their meaning, parsing and validation. Independent of the rest of Nereid."""
