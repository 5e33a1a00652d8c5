-- Everything that a batch's verdicts depend on, in one statement (R-RLS-10): what stands under the name, by pg_class
-- and pg_namespace (to_regclass fails without USAGE), and the snapshot that says whose changes it includes.
-- $1 schema, $2 table, $3 the database roles that the project's tokens may map to.
select pg_current_snapshot()::text, (
    select json_build_object(
        'oid', c.oid::int8,
        'kind', c.relkind,
        'identity', c.relreplident,
        'row_security', c.relrowsecurity,
        -- Where a partitioned table's rows are: whether a row that is under a leaf's name in the log is one of them.
        -- Not by pg_partition_tree, which waits for whoever has locked one of them, and looks past the snapshot.
        'leaves', case when c.relkind = 'p' then array(
            with recursive tree (oid) as (
                select c.oid union all select i.inhrelid from tree t join pg_inherits i on i.inhparent = t.oid)
            select json_build_array(l.oid::int8, (select ln.nspname from pg_namespace ln where ln.oid = l.relnamespace),
                l.relname)
            from tree t join pg_class l on l.oid = t.oid where l.relkind = 'r' order by l.oid) end,
        'columns', array(
            -- Not a join: it would be planned as a scan of pg_type, which has two rows for every table there is.
            select json_build_array(a.attnum, a.attname, a.atttypid::int8,
                (select t.typname from pg_type t where t.oid = a.atttypid), a.attcollation::int8)
            from pg_attribute a
            where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped order by a.attnum),
        'key', coalesce((select i.indkey::int2[] from pg_index i where i.indrelid = c.oid and i.indisprimary), '{}'),
        -- Policies with WITH CHECK only have no USING and grant no reading.
        'policies', array(
            select json_build_object(
                'oid', p.oid::int8,
                'permissive', p.polpermissive,
                'using', pg_get_expr(p.polqual, p.polrelid),
                -- What it depends on, but for what came with the server, which has no entry. Of its own table: the columns, system
                -- columns below zero, 0 the table itself. Of a function without arguments that is nothing but its text: this.
                'depends', array(
                    select case
                        when d.refclassid = 'pg_class'::regclass and d.refobjid = c.oid then to_json(d.refobjsubid)
                        when d.refclassid = 'pg_proc'::regclass then (
                            select json_build_array(f.pronamespace::regnamespace::text || '.' || f.proname,
                                f.prorettype::int8, f.prosrc)
                            from pg_proc f
                            -- 14: the language SQL.
                            where f.oid = d.refobjid and f.pronargs = 0 and f.prolang = 14
                                and not f.prosecdef and f.proconfig is null and not f.proretset
                                and has_function_privilege('public', f.oid, 'EXECUTE'))
                    end
                    from pg_depend d where d.classid = 'pg_policy'::regclass and d.objid = p.oid))
            from pg_policy p
            where p.polrelid = c.oid and p.polcmd in ('r', '*') and p.polqual is not null
            -- As the server evaluates them: one that is false may spare a row a cast in another.
            order by p.polpermissive, case when not p.polpermissive then p.polname end, p.polname desc),
        'roles', array(
            select json_build_object(
                'name', r.rolname,
                'bound', c.relrowsecurity and not r.rolsuper and not r.rolbypassrls
                    and (c.relforcerowsecurity or not pg_has_role(r.oid, c.relowner, 'USAGE')),
                'usage', has_schema_privilege(r.oid, c.relnamespace, 'USAGE'),
                -- Null: all of them.
                'readable', case when not has_table_privilege(r.oid, c.oid, 'SELECT') then array(
                    select a.attnum from pg_attribute a
                    where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
                        and has_column_privilege(r.oid, c.oid, a.attnum, 'SELECT')) end,
                'policies', array(
                    select p.oid::int8 from pg_policy p
                    where p.polrelid = c.oid and exists (
                        select from unnest(p.polroles) as member (oid)
                        where member.oid = 0 or pg_has_role(r.oid, member.oid, 'USAGE'))))
            from pg_roles r where r.rolname = any ($3) order by r.oid)
    )::text
    from pg_class c
    where c.relnamespace = (select n.oid from pg_namespace n where n.nspname = $1) and c.relname = $2)
