-- What comparing values of a column takes. $1 its type, $2 the type that is compared, $3 its collation.
select pg_catalog.format_type($1, null), n.nspname::text, t.typname::text, t.typcategory::text, c.nspname, c.collname,
    coalesce(c.deterministic, true), coalesce(c.bytewise, false),
    d.encoding = pg_catalog.pg_char_to_encoding('UTF8'),
    -- The pattern operators that take the type at their left, and whether also at their right; else text.
    array(select o.oprname::text from pg_catalog.pg_operator o where o.oprleft = t.oid and o.oprright = t.oid
        and o.oprresult = 16 and o.oprnamespace in (11, t.typnamespace)),
    array(select o.oprname::text from pg_catalog.pg_operator o where o.oprleft = t.oid and o.oprright = 25
        and o.oprresult = 16 and o.oprnamespace in (11, t.typnamespace)),
    (select pg_catalog.quote_ident(dn.nspname) || '.' || pg_catalog.quote_ident(dt.typname)
        from pg_catalog.pg_type dt join pg_catalog.pg_namespace dn on dn.oid = dt.typnamespace where dt.oid = $1)
from pg_catalog.pg_type t
join pg_catalog.pg_namespace n on n.oid = t.typnamespace
join pg_catalog.pg_database d on d.datname = pg_catalog.current_database()
left join lateral (
    select cn.nspname::text, cc.collname::text, cc.collisdeterministic as deterministic,
        case cc.collprovider
            -- Older servers have no other provider for a whole database.
            when 'd' then coalesce(pg_catalog.to_jsonb(d) ->> 'datlocprovider', 'c') = 'c'
                and d.datcollate in ('C', 'POSIX')
            when 'c' then cc.collcollate in ('C', 'POSIX')
            else false end as bytewise
    from pg_catalog.pg_collation cc join pg_catalog.pg_namespace cn on cn.oid = cc.collnamespace
    where cc.oid = $3
) c on true
where t.oid = $2
