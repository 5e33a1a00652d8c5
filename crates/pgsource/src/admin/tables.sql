-- One row per relation. $1 schemas, $2 exact name or null, $3 part of a name or null, $4 and $5 the (schema, table) before
-- the first or null, $6 limit.
select c.oid::int8, n.nspname::text, c.relname::text, c.relkind::text, c.relpersistence::text, c.relreplident::text,
    (select i.relname::text from pg_index x join pg_class i on i.oid = x.indexrelid
        where x.indrelid = c.oid and x.indisreplident),
    pg_get_userbyid(c.relowner)::text,
    pg_has_role(c.relowner, 'USAGE'),
    c.relrowsecurity,
    (select count(*) from pg_policy p where p.polrelid = c.oid and p.polcmd in ('r', '*') and p.polqual is not null),
    exists (select from pg_index x where x.indrelid = c.oid and x.indisprimary),
    c.relnatts::int8,
    n.nspname in ('information_schema', 'aura', 'aura_source', 'auth') or n.nspname like 'pg\_%',
    case when c.relkind = 'p' then array(
        select json_build_array(l.oid::int8, ln.nspname, l.relname, l.relreplident)::text
        from pg_partition_tree(c.oid) t
        join pg_class l on l.oid = t.relid
        join pg_namespace ln on ln.oid = l.relnamespace
        where t.isleaf and l.relkind = 'r' order by l.oid) else '{}' end
from pg_class c
join pg_namespace n on n.oid = c.relnamespace
where n.nspname = any ($1::text[]) and c.relkind in ('r', 'p', 'v', 'm', 'f')
    and ($2::text is null or c.relname = $2)
    -- A list shows what can be enabled: neither views nor partitioned tables, but the partitions that hold their rows.
    and ($2::text is not null or (c.relkind = 'r' and c.relpersistence = 'p'))
    and ($3::text is null or strpos(lower(c.relname), lower($3)) > 0)
    and ($4::text is null or (n.nspname::text collate "C", c.relname::text collate "C")
        > ($4::text collate "C", $5::text collate "C"))
order by n.nspname::text collate "C", c.relname::text collate "C"
limit $6
