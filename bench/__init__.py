"""Measurements of Nereid: `./just bench NAME`. Imports app; app never imports it."""
