-- A face keeps the name that it was registered with. Persons and clusters, which were guessed, are not kept any more, nor are names that
-- a face has got from them.
ALTER TABLE parts ADD name text;
UPDATE parts SET name = persons.name FROM persons, images
WHERE person_id = person AND number = image AND starts_with(image_id, 'deepstack-face-');
ALTER TABLE parts DROP person;
DROP INDEX parts_tenant_idx;  -- of all faces
CREATE INDEX ON parts (tenant, name) WHERE name IS NOT NULL;
DROP TABLE persons, clusters;
DO $$ DECLARE model record; BEGIN
    FOR model IN SELECT number FROM models LOOP
        EXECUTE format('DROP TABLE members_%s', model.number);
    END LOOP;
END $$;
ANALYZE parts;  -- names are few: without that the planner looks at all faces
