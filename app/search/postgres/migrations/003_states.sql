-- A change of the model goes on by the numbers of vectors, and loses as many images as its caller names.
SET LOCAL lock_timeout = '5s';  -- who waits for a table holds up all others
UPDATE jobs SET position = '', options = options || '{"allow_missing": 0}', claim = claim + 1, state = 'waiting'
WHERE kind = 'reindex' AND ended_at IS NULL;

ALTER TABLE jobs
    ADD folders jsonb NOT NULL DEFAULT '{}',  -- that who takes it must have: their paths and numbers
    ADD deaths integer NOT NULL DEFAULT 0;
CREATE TABLE failures (
    job_id uuid NOT NULL REFERENCES jobs ON DELETE CASCADE,
    tenant text NOT NULL DEFAULT current_setting('nereid.tenant'),
    name text NOT NULL,
    code text NOT NULL,
    why text NOT NULL
);
CREATE UNIQUE INDEX ON failures (job_id, md5(name));  -- a path may be too long
CALL protect('failures');

CREATE TABLE unused (number integer PRIMARY KEY);  -- of tables of vectors that are to be dropped

ALTER TABLE images ADD states jsonb;  -- of parts; null for images that were there before

DO $$ DECLARE model record; BEGIN  -- what filters leave is counted before vectors are compared
    FOR model IN SELECT number FROM models LOOP
        EXECUTE format('CREATE INDEX ON vectors_%s (tenant, index, added_at)', model.number);
        EXECUTE format('CREATE INDEX ON vectors_%s (tenant, index, class_name) WHERE class_name IS NOT NULL', model.number);
        EXECUTE format('DROP INDEX IF EXISTS vectors_%s_tenant_index_idx', model.number);
    END LOOP;
END $$;
