// Makes a table live with the client that openapi-typescript and openapi-fetch make of the API's document.
//
//     node toggle.js <origin> <service key> <project> <table>
import createClient from 'openapi-fetch';
import type { paths } from './schema';

declare const process: { argv: string[]; exitCode: number };
const [baseUrl = '', apikey = '', project = '', table = ''] = process.argv.slice(2);

const api = createClient<paths>({ baseUrl, headers: { apikey } });
const toggle = '/v1/db/{project}/schema/tables/{table}/realtime';
const params = { path: { project, table } };
const { data, error } = await api.PUT(toggle, { params, body: { enabled: true } });
console.log(JSON.stringify(data ?? error));

const { error: refused } = await api.GET(toggle, { params: { path: { project, table: 'nothing' } } });
console.log(refused?.code);

// @ts-expect-error: there is no such path, and the compiler says so.
const nowhere = () => api.GET('/v1/nowhere');
// @ts-expect-error: nor such a member.
const unknown = () => api.PUT(toggle, { params, body: { enabld: true } });
