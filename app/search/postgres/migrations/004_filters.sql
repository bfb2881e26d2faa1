-- Images whose metadata contain others, looked up as in match_words of 001: for those who ask, @> looks at all rows of the tenant.
SET LOCAL lock_timeout = '5s';  -- as in 003
CREATE INDEX ON images USING gin (metadata jsonb_path_ops) WITH (fastupdate = off);
CREATE FUNCTION match_metadata(subset jsonb, most integer) RETURNS SETOF bigint
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT AS $$
    SELECT number FROM images WHERE metadata @> subset AND tenant = current_setting('nereid.tenant') LIMIT most
$$;
REVOKE EXECUTE ON FUNCTION match_metadata FROM PUBLIC;
GRANT EXECUTE ON FUNCTION match_metadata TO nereid_search;
