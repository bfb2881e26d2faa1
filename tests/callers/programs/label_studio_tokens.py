"""label-studio-sdk: allow the legacy tokens of an organization, or not; prints a personal access token, a new one with `off`.

Arguments: the address of Label Studio, a token, `on` or `off`.
"""

import json
import sys

from label_studio_sdk import LabelStudio

address, token, legacy = sys.argv[1:]
client = LabelStudio(base_url=address, api_key=token)
personal = client.tokens.create().token if legacy == "off" else token  # a user has at most one
client.jwt_settings.update(api_tokens_enabled=True, api_token_ttl_days=1, legacy_api_tokens_enabled=legacy == "on")
print(json.dumps(personal))
