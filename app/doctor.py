"""Is everything here that is needed, and does it work together."""
from app.config import Settings
def report(settings: Settings) -> int:
    return 0
