-- A change of the model goes on by the numbers of vectors, and loses as many images as its caller names.
UPDATE jobs SET position = '', options = options || '{"allow_missing": 0}' WHERE kind = 'reindex';

ALTER TABLE jobs
    ADD folders jsonb NOT NULL DEFAULT '{}',  -- that who takes it must have: their paths and numbers
    ADD deaths integer NOT NULL DEFAULT 0;
CREATE TABLE failures (
    job_id uuid NOT NULL REFERENCES jobs ON DELETE CASCADE,
    tenant text NOT NULL DEFAULT current_setting('nereid.tenant'),
    name text NOT NULL,
    code text NOT NULL,
    why text NOT NULL,
    PRIMARY KEY (job_id, name)
);
CALL protect('failures');

ALTER TABLE images ADD states jsonb;  -- of parts; null for images that were there before

DO $$ DECLARE model record; BEGIN  -- what filters leave is counted before vectors are compared
    FOR model IN SELECT number FROM models LOOP
        EXECUTE format('CREATE INDEX ON vectors_%s (tenant, index, added_at)', model.number);
        EXECUTE format('CREATE INDEX ON vectors_%s (tenant, index, class_name) WHERE class_name IS NOT NULL', model.number);
        EXECUTE format('DROP INDEX IF EXISTS vectors_%s_tenant_index_idx', model.number);
    END LOOP;
END $$;
