"""One request from encoded image to detections. Joins imaging, Triton and detection; never knows HTTP or gRPC."""
