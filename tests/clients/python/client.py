"""A stock PyPI realtime client, driven through stdin and stdout, one JSON object per line.

    python client.py <ws url> <key> [user token]

The commands and answers are those of ../js/client.mjs.
"""

import asyncio
import json
import sys

from realtime import AsyncRealtimeClient


def plain(value):
    """Some callbacks get models of pydantic."""
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else str(value)


def say(**what):
    print(json.dumps(what, default=plain), flush=True)


async def join(client, channels, topic, bindings):
    channel = client.channel(topic)
    channels[topic] = channel
    for binding in bindings:
        channel.on_postgres_changes(callback=lambda change: say(topic=topic, change=change), **binding)
    channel.on_system(lambda system: say(topic=topic, system=system))
    await channel.subscribe(
        lambda status, error: say(topic=topic, status=getattr(status, "value", status), error=error and str(error))
    )


async def obey(client, channels, command):
    topic = command.get("topic")
    if command["do"] == "join":
        await join(client, channels, topic, command["bindings"])
    elif command["do"] == "leave":
        await client.remove_channel(channels.pop(topic))
        say(topic=topic, left="ok")
    elif command["do"] == "auth":
        await client.set_auth(command["token"])
        say(auth=True)


async def main(url, key, token=None):
    client = AsyncRealtimeClient(url, key)
    await client.connect()
    if token:
        await client.set_auth(token)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    channels = {}
    say(ready=True)
    while line := await lines.readline():
        await obey(client, channels, json.loads(line))
    await client.close()


asyncio.run(main(*sys.argv[1:]))
