"""The tests: one file per module of app/, and test_detect, test_layouts, test_accuracy and test_serve for the whole."""
