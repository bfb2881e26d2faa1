"""One request from encoded image to the result of a model. Connects imaging, Triton and the tasks; knows neither HTTP nor gRPC."""
