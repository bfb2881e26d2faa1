"""The servers Nereid is measured against, and what they share. Never know who measures them."""
