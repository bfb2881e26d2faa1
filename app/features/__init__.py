"""What the gateway can do besides detecting: each folder is a feature, as `app.feature` describes it."""
