"""Small models of segmentation, pose and oriented boxes, made here: `./just task-models`. Run in an environment of their own."""
