// A stock @supabase/realtime-js, driven through stdin and stdout, one JSON object per line.
//
//   node client.mjs <package> <ws url> <key> [user token]
//
//   in:  {"do":"join","topic":"a","bindings":[{"event":"*","schema":"public","table":"t","filter":"id=eq.1"}]}
//        {"do":"leave","topic":"a"}   {"do":"auth","token":"…"}   {"do":"broadcast","topic":"a","event":"e","payload":{}}
//   out: {"topic":"a","status":"SUBSCRIBED","error":null}   {"topic":"a","change":{…}}   {"topic":"a","system":{…}}
import { createInterface } from 'node:readline';
import WebSocket from 'ws';

const [library, url, key, token] = process.argv.slice(2);
const { RealtimeClient } = await import(library);

const say = (object) => process.stdout.write(`${JSON.stringify(object)}\n`);
const client = new RealtimeClient(url, { params: { apikey: key }, transport: WebSocket });
const channels = new Map();
if (token) await client.setAuth(token);

const commands = {
  join({ topic, bindings }) {
    const channel = client.channel(topic);
    channels.set(topic, channel);
    for (const binding of bindings) {
      channel.on('postgres_changes', binding, (change) => say({ topic, change }));
    }
    channel.on('system', {}, (system) => say({ topic, system }));
    channel.on('broadcast', { event: '*' }, (broadcast) => say({ topic, broadcast }));
    channel.subscribe((status, error) => say({ topic, status, error: error ? error.message : null }));
  },
  async leave({ topic }) {
    say({ topic, left: await client.removeChannel(channels.get(topic)) });
    channels.delete(topic);
  },
  async auth({ token: fresh }) {
    await client.setAuth(fresh);
    say({ auth: true });
  },
  async broadcast({ topic, event, payload }) {
    say({ topic, sent: await channels.get(topic).send({ type: 'broadcast', event, payload }) });
  },
};

say({ ready: true });
for await (const line of createInterface({ input: process.stdin })) {
  const command = JSON.parse(line);
  await commands[command.do](command);
}
process.exit(0);
