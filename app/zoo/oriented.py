"""Suppression of oriented boxes by their probabilistic IoU in standard operators, as Ultralytics suppresses them.

A box is a normal distribution. It falls if any better one of its class, also one that falls itself, is as near as the IoU says.
"""

from math import log1p

EPSILON = 1e-7

# As many candidates are compared as are above the floor in one of the images, but enough for the last TopK. In DOUBLE, because
# TensorRT would compute FP32 as FP16, which cannot hold products of areas.
SUPPRESS = """
    floor = Constant <value_float = {floor}> ()
    is_above = Greater (score, floor)
    above = Cast <to = 7> (is_above)
    counts = ReduceSum <keepdims = 0> (above, one)
    most = ReduceMax <axes = [0], keepdims = 1> (counts)
    reach = Max (most, limit)
    first = Constant <value_ints = [0]> ()
    three = Constant <value_ints = [3]> ()
    geometry = Concat <axis = 1> (centre, size, features)
    five_rows = Constant <value_ints = [1, 5, 1]> ()
    geometry_rows = Tile (anchor_row, five_rows)
    all_places = GatherElements <axis = 2> (geometry, geometry_rows)
    places = Slice (all_places, first, reach, two)
    centre_size_angle = Constant <value_ints = [2, 2, 1]> ()
    near_centre, near_size, angle = Split <axis = 1> (places, centre_size_angle)

    exact_size = Cast <to = 11> (near_size)
    squares = Mul (exact_size, exact_size)
    twelve = Constant <value = double {{12.0}}> ()
    variances = Div (squares, twelve)
    along, across = Split <axis = 1> (variances)
    difference = Sub (along, across)
    cos = Cos (angle)
    sin = Sin (angle)
    left = Concat <axis = 1> (cos, sin, cos)
    right = Concat <axis = 1> (cos, sin, sin)
    turn = Mul (left, right)
    exact_turn = Cast <to = 11> (turn)
    turned = Mul (difference, exact_turn)
    diagonal = Constant <value = double[1, 3, 1] {{1.0, 1.0, 0.0}}> ()
    round = Mul (across, diagonal)
    covariance = Add (round, turned)
    width, height = Split <axis = 1> (exact_size)
    area = Mul (width, height)
    six = Constant <value = double {{6.0}}> ()
    root = Div (area, six)

    covariance_column = Unsqueeze (covariance, three)
    covariance_row = Unsqueeze (covariance, two)
    covariances = Add (covariance_column, covariance_row)
    xx, yy, xy = Split <axis = 1> (covariances)
    exact_centre = Cast <to = 11> (near_centre)
    centre_column = Unsqueeze (exact_centre, three)
    centre_row = Unsqueeze (exact_centre, two)
    apart = Sub (centre_column, centre_row)
    dx, dy = Split <axis = 1> (apart)
    root_column = Unsqueeze (root, three)
    root_row = Unsqueeze (root, two)
    roots = Mul (root_column, root_row)

    xx_yy = Mul (xx, yy)
    xy_xy = Mul (xy, xy)
    determinant = Sub (xx_yy, xy_xy)
    epsilon = Constant <value = double {{{epsilon}}}> ()
    far_divisor = Add (determinant, epsilon)
    dy_dy = Mul (dy, dy)
    dx_dx = Mul (dx, dx)
    dx_dy = Mul (dx, dy)
    xx_dy_dy = Mul (xx, dy_dy)
    yy_dx_dx = Mul (yy, dx_dx)
    xy_dx_dy = Mul (xy, dx_dy)
    both_squares = Add (xx_dy_dy, yy_dx_dx)
    less_once = Sub (both_squares, xy_dx_dy)
    less_twice = Sub (less_once, xy_dx_dy)
    far = Div (less_twice, far_divisor)
    unlike_divisor = Add (roots, epsilon)
    unlike_ratio = Div (determinant, unlike_divisor)
    unlike_positive = Add (unlike_ratio, epsilon)
    unlike = Log (unlike_positive)
    far_unlike_once = Add (far, unlike)
    four_distances = Add (far_unlike_once, unlike)
    max_four_distances = Constant <value = double {{{four_distances}}}> ()
    is_near_plane = LessOrEqual (four_distances, max_four_distances)
    is_near = Squeeze (is_near_plane, one)

    near_label = Slice (label, first, reach, one)
    label_column = Unsqueeze (near_label, two)
    label_row = Unsqueeze (near_label, one)
    is_same = Equal (label_column, label_row)
    is_near_same = And (is_near, is_same)
    diagonals = Constant <value_int = 1> ()
    is_better_near = Trilu <upper = 1> (is_near_same, diagonals)
    better_near = Cast <to = 1> (is_better_near)
    fall = ReduceMax <axes = [1], keepdims = 0> (better_near)
    near_score = Slice (score, first, reach, one)
    kept_bound = Max (fall, floor)
    is_kept = Greater (near_score, kept_bound)
    kept_score = Where (is_kept, near_score, zero)"""


def max_distance(iou: float) -> float:
    """Return the Bhattacharyya distance of an IoU: 1 - sqrt(1 - exp(-distance) + epsilon); no two boxes have an IoU of 1."""
    distance = -log1p(EPSILON - (1 - iou) ** 2) if iou > 0 else 100.0
    return distance if distance >= EPSILON else -100.0
