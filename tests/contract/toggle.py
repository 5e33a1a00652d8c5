"""Makes a table live with the client that openapi-python-client makes of the API's document.

    python toggle.py <origin> <service key> <project> <table>
"""

import json
import sys
from uuid import UUID

from aura_realtime import AuthenticatedClient
from aura_realtime.api.tables import get_table_realtime, put_table_realtime
from aura_realtime.models import Problem, RealtimeState

origin, key, project, table = sys.argv[1:]
client = AuthenticatedClient(base_url=origin, token=key)
live = put_table_realtime.sync(UUID(project), table, client=client, body=RealtimeState(enabled=True))
print(json.dumps(live.to_dict()))

refused = get_table_realtime.sync(UUID(project), "nothing", client=client)
assert isinstance(refused, Problem), refused
print(refused.code)
