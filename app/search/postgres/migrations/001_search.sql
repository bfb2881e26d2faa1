-- Tenants: requests run as nereid_search, which sees the rows of the tenant in the setting nereid.tenant. Work for all tenants
-- (jobs, re-indexing) and definitions run as the owner.
DO $$ BEGIN
    IF to_regrole('nereid_search') IS NULL THEN  -- who may not make it is refused even if it is there
        CREATE ROLE nereid_search NOLOGIN;
    END IF;
EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL;
END $$;
DO $$ BEGIN
    IF NOT pg_has_role(current_user, 'nereid_search', 'SET') THEN
        EXECUTE format('GRANT nereid_search TO %I', current_user);
    END IF;
    EXECUTE format('GRANT USAGE ON SCHEMA %I TO nereid_search', current_schema());
END $$;

CREATE TABLE models (
    number integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,  -- its vectors are in vectors_<number>
    family text NOT NULL,
    model text NOT NULL,
    dimensions integer NOT NULL,
    state text NOT NULL CHECK (state IN ('active', 'next')),
    UNIQUE (family, state),
    UNIQUE (family, model)
);

CREATE TABLE images (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant text NOT NULL DEFAULT current_setting('nereid.tenant'),
    image_id text NOT NULL,
    content_hash bytea NOT NULL,
    path text,
    metadata jsonb NOT NULL,
    width integer NOT NULL,
    height integer NOT NULL,
    added_at timestamptz NOT NULL DEFAULT now(),
    group_id uuid,  -- of near duplicates
    thumbnail bytea,
    UNIQUE (tenant, image_id)
);
CREATE INDEX ON images (tenant, content_hash);
CREATE INDEX ON images (tenant, group_id) WHERE group_id IS NOT NULL;

CREATE TABLE persons (
    person_id uuid DEFAULT gen_random_uuid() PRIMARY KEY,
    tenant text NOT NULL DEFAULT current_setting('nereid.tenant'),
    name text
);
CREATE INDEX ON persons (tenant, name);

CREATE TABLE parts (
    part_id uuid PRIMARY KEY,
    tenant text NOT NULL DEFAULT current_setting('nereid.tenant'),
    image bigint NOT NULL REFERENCES images ON DELETE CASCADE,
    position integer NOT NULL,  -- among the parts of the image
    index text,
    box double precision[] NOT NULL,
    score double precision NOT NULL,
    class_id integer,  -- of objects
    class_name text,
    landmarks double precision[],  -- of faces
    quality double precision,
    person uuid REFERENCES persons ON DELETE SET NULL,
    thumbnail bytea
);
CREATE INDEX ON parts (image);
CREATE INDEX ON parts (person) WHERE person IS NOT NULL;
CREATE INDEX ON parts (tenant) WHERE landmarks IS NOT NULL;

CREATE TABLE texts (
    image bigint PRIMARY KEY REFERENCES images ON DELETE CASCADE,
    tenant text NOT NULL DEFAULT current_setting('nereid.tenant'),
    lines jsonb NOT NULL,
    words tsvector NOT NULL,
    grams text[] NOT NULL
);
CREATE INDEX ON texts (tenant);
CREATE INDEX ON texts USING gin (words);
CREATE INDEX ON texts USING gin (grams);

CREATE TABLE clusters (
    model integer NOT NULL REFERENCES models ON DELETE CASCADE,
    tenant text NOT NULL DEFAULT current_setting('nereid.tenant'),
    index text NOT NULL,
    cluster_id integer NOT NULL,
    centre vector NOT NULL,
    made_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant, model, index, cluster_id)
);

CREATE TABLE jobs (
    job_id uuid DEFAULT gen_random_uuid() PRIMARY KEY,
    tenant text NOT NULL DEFAULT current_setting('nereid.tenant'),
    kind text NOT NULL,
    options jsonb NOT NULL,
    state text NOT NULL DEFAULT 'waiting',
    position text NOT NULL DEFAULT '',
    counts jsonb NOT NULL DEFAULT '{}',
    error text,
    created_at timestamptz NOT NULL DEFAULT now(),
    ended_at timestamptz,
    claim integer NOT NULL DEFAULT 0,  -- how often it was taken; who took it last may save it
    saved_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX ON jobs (tenant, created_at);
CREATE INDEX ON jobs (created_at) WHERE state IN ('waiting', 'running');

CREATE PROCEDURE protect(relation regclass) LANGUAGE plpgsql AS $$ BEGIN
    EXECUTE format('ALTER TABLE %s ENABLE ROW LEVEL SECURITY', relation);
    EXECUTE format('ALTER TABLE %s FORCE ROW LEVEL SECURITY', relation);
    EXECUTE format('CREATE POLICY tenant ON %s TO nereid_search USING (tenant = current_setting(''nereid.tenant''))', relation);
    EXECUTE format('CREATE POLICY owner ON %s TO CURRENT_USER USING (true)', relation);
    EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON %s TO nereid_search', relation);
END $$;
CALL protect('images');
CALL protect('persons');
CALL protect('parts');
CALL protect('texts');
CALL protect('clusters');
CALL protect('jobs');
GRANT SELECT ON models TO nereid_search;

-- PostgreSQL does not look up @@ and && in an index before it has checked row-level security, because they might tell others'
-- rows (they are not leakproof): so these two look as the owner, for the rows of the tenant.
CREATE FUNCTION match_words(query tsquery) RETURNS TABLE (image bigint, score real)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT AS $$
    SELECT image, ts_rank(words, query) FROM texts WHERE words @@ query AND tenant = current_setting('nereid.tenant')
$$;
-- Those that have `at_least` of the grams. Such a text has one of the rarest of them, however many the others are in: looked up are
-- so many of the rarest, according to some texts of the tenant, as cannot all be missing. Counted is by ts_rank, for which a query
-- of alternatives that all weigh 1 is worth the share that is there / (1 + 1/4 + 1/9 + ...): `unnest` takes three times as long.
CREATE FUNCTION match_grams(query text[], at_least integer) RETURNS TABLE (image bigint, score real)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT AS $$
    WITH counted AS (
        SELECT gram, count(*) AS texts
        FROM (SELECT grams FROM texts WHERE tenant = current_setting('nereid.tenant') LIMIT 100) few, unnest(grams) gram
        WHERE gram = ANY (query) GROUP BY gram
    ), rare AS (
        SELECT gram FROM unnest(query) gram LEFT JOIN counted USING (gram)
        ORDER BY texts NULLS FIRST LIMIT cardinality(query) - at_least + 1
    )
    SELECT image, (same / (cardinality(grams) + cardinality(query) - same))::real
    FROM texts, LATERAL (SELECT round(cardinality(query) * 1.64493406685 * ts_rank('{1,1,1,1}', array_to_tsvector(grams),
        (SELECT string_agg(quote_literal(gram), '|')::tsquery FROM unnest(query) gram))) AS same OFFSET 0) compared
    WHERE grams && ARRAY (SELECT gram FROM rare) AND tenant = current_setting('nereid.tenant') AND same >= at_least
$$;
REVOKE EXECUTE ON FUNCTION match_words, match_grams FROM PUBLIC;
GRANT EXECUTE ON FUNCTION match_words, match_grams TO nereid_search;
