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
        select json_build_array(l.oid::int8, ln.nspname, l.relname, l.relreplident, (
            select i.relname from pg_index x join pg_class i on i.oid = x.indexrelid
            where x.indrelid = l.oid and x.indisreplident))::text
        from pg_partition_tree(c.oid) t
        join pg_class l on l.oid = t.relid
        join pg_namespace ln on ln.oid = l.relnamespace
        where t.isleaf and l.relkind = 'r' order by l.oid) else '{}' end,
    -- Of one table that is asked for by name: whether one of the project's roles that aren't its back end may read any of it.
    $2::text is null or exists (
        select from pg_roles r
        where r.rolname ~ '^p_[0-9a-f-]{36}_' and r.rolname !~ '_(service_role|visibility)$'
            and has_schema_privilege(r.oid, n.oid, 'USAGE') and has_any_column_privilege(r.oid, c.oid, 'SELECT')),
    -- And its policies that can't be judged on rows of the log, with why. The tree names every function, also the built-in
    -- ones, which no dependency does; a function that calls one that writes isn't looked into further.
    case when $2::text is null or not c.relrowsecurity then '{}' else array(
        select json_build_array(p.polname, case
            when pg_get_expr(p.polqual, p.polrelid) ~ '\m(ctid|xmin|xmax|cmin|cmax|tableoid)\M' then 'system_column'
            when exists (
                select from regexp_matches(p.polqual::text, ':(?:op)?funcid ([0-9]+)', 'g') f (found)
                join pg_proc w on w.oid = f.found[1]::oid
                where w.proname in ('nextval', 'setval', 'pg_notify')
                    or (w.provolatile = 'v' and w.prosrc ~* '\m(insert|update|delete|merge|nextval|setval|notify)\M'))
                then 'writes'
            when current_setting('server_version_num')::int < 180000 and exists (
                select from pg_replication_slots s
                where s.plugin = 'pgoutput' and s.database = current_database() and s.slot_name like 'aura\_cdc%')
                and exists (
                select from pg_depend d join pg_attribute a on a.attrelid = d.refobjid and a.attnum = d.refobjsubid
                where d.classid = 'pg_policy'::regclass and d.objid = p.oid and d.refclassid = 'pg_class'::regclass
                    and d.refobjid = c.oid and a.attgenerated <> '') then 'generated_column' end)::text
        from pg_policy p
        where p.polrelid = c.oid and p.polcmd in ('r', '*') and p.polqual is not null order by p.polname) end,
    -- Permissive policies that can let somebody read; and of those, asked for by name, the ones for a role that one of the
    -- project's has.
    (select count(*) from pg_policy p
        where p.polrelid = c.oid and p.polcmd in ('r', '*') and p.polqual is not null and p.polpermissive),
    $2::text is null or exists (
        select from pg_policy p cross join unnest(p.polroles) as role (oid)
        where p.polrelid = c.oid and p.polcmd in ('r', '*') and p.polqual is not null and p.polpermissive
            and (role.oid = 0 or exists (
                select from aclexplode(n.nspacl) a join pg_roles r on r.oid = a.grantee
                where a.privilege_type = 'USAGE' and r.rolname ~ '^p_[0-9a-f-]{36}_'
                    and r.rolname !~ '_(service_role|visibility)$' and pg_has_role(r.oid, role.oid, 'USAGE')))),
    -- From the planner's statistics: looking at the table itself would wait for its locks.
    case when c.reltuples > 0
        then ((c.relpages + coalesce((select t.relpages from pg_class t where t.oid = c.reltoastrelid), 0))
            * current_setting('block_size')::float8 / c.reltuples)::int8 end
from pg_class c
join pg_namespace n on n.oid = c.relnamespace
where n.nspname = any ($1::text[]) and c.relkind in ('r', 'p', 'v', 'm', 'f')
    and ($2::text is null or c.relname = $2)
    -- A list shows what can be enabled: no views; partitioned tables, and the partitions that hold their rows.
    and ($2::text is not null or (c.relkind in ('r', 'p') and c.relpersistence = 'p'))
    and ($3::text is null or strpos(lower(c.relname), lower($3)) > 0)
    and ($4::text is null or (n.nspname::text collate "C", c.relname::text collate "C")
        > ($4::text collate "C", $5::text collate "C"))
order by n.nspname::text collate "C", c.relname::text collate "C"
limit $6
