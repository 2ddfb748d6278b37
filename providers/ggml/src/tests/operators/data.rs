//! Operators that move, index and quantize elements.

use super::*;

pub(super) fn indexed() -> Vec<Case> {
    let x = || Fed(noise(&[4, 5, 6], 1));
    let bytes = || Fed(from(&[4, 5, 6], |i| i as u8));
    let along = |shape: &[usize], len: i64| from(shape, |i| (i as i64 * 7) % (2 * len) - len);
    let mut cases = Vec::new();
    for axis in [0, 1, -1] {
        let len = [4, 5, 6][if axis < 0 { 2 } else { axis as usize }];
        let attributes = [("axis", int(axis))];
        let index = || Fed(along(&[3, 4, 5], len));
        cases.push(case("GatherElements", 18, &attributes, vec![x(), index()]));
        cases.push(case("GatherElements", 18, &attributes, vec![bytes(), index()]));
        for reduction in ["none", "add", "mul", "max", "min"] {
            let attributes = [attributes[0].clone(), ("reduction", text(reduction))];
            cases.push(case(
                "ScatterElements",
                18,
                &attributes,
                vec![x(), index(), Fed(noise(&[3, 4, 5], 2))],
            ));
        }
        let updates = Fed(from(&[3, 4, 5], |i| i as u8 + 100));
        cases.push(case("ScatterElements", 18, &attributes, vec![bytes(), index(), updates]));
    }
    let pairs = || Fed(from(&[3, 2, 2], |i| (i as i64 * 3) % 8 - 4));
    cases.push(case("GatherND", 18, &[], vec![x(), pairs()]));
    cases.push(case("GatherND", 18, &[], vec![bytes(), Fed(from(&[2, 3], |i| (i as i64) % 4))]));
    cases.push(case(
        "GatherND",
        18,
        &[("batch_dims", int(1))],
        vec![x(), Fed(from(&[4, 3, 1], |i| i as i64 % 5))],
    ));
    for reduction in ["none", "add", "mul", "max", "min"] {
        let attributes = [("reduction", text(reduction))];
        cases.push(case("ScatterND", 18, &attributes, vec![x(), pairs(), Fed(noise(&[3, 2, 6], 2))]));
    }
    cases.push(case(
        "ScatterND",
        18,
        &[],
        vec![
            Fed(noise(&[90, 100], 1)),
            Fed(from(&[40, 1], |i| (i as i64 * 7) % 90)),
            Fed(noise(&[40, 100], 2)),
        ],
    ));
    cases
}

pub(super) fn quantised() -> Vec<Case> {
    let mut cases = Vec::new();
    // Shape of the scales and zero points, and attributes.
    type Way<'a> = (&'a [usize], Vec<(&'a str, Attribute)>);
    let ways: Vec<Way<'_>> = vec![
        (&[], vec![]),
        (&[3], vec![("axis", int(1))]),
        (&[9], vec![("axis", int(-1))]),
        (&[2, 2, 9], vec![("axis", int(1)), ("block_size", int(2))]),
        (&[2, 3, 3], vec![("axis", int(2)), ("block_size", int(4))]),
    ];
    for (shape, attributes) in &ways {
        let scale = || positive(shape, 2);
        let x = || Fed(from(&[2, 3, 9], |i| ((i * 37) % 100) as f32 / 3.0 - 15.0));
        let u8s = |shape: &[usize]| from(shape, |i| (i * 37 % 256) as u8);
        let i8s = |shape: &[usize]| from(shape, |i| (i * 37 % 256) as u8 as i8);
        let i16s = |shape: &[usize]| from(shape, |i| (i * 1237) as u16 as i16);
        let whole = [2, 3, 9];
        let mut pairs = vec![
            (u8s(&whole), Some(u8s(shape))),
            (i8s(&whole), Some(i8s(shape))),
            (i16s(&whole), Some(i16s(shape))),
            (from(&whole, |i| i as u16 * 777), None),
            (from(&whole, |i| i as i32 * 7777 - 100_000), None),
        ];
        for (values, zero) in pairs.drain(..) {
            let zero = |fed: bool| match &zero {
                Some(zero) if fed => Fed(zero.clone()),
                Some(zero) => Constant(zero.clone()),
                None => Absent,
            };
            let dequantize = vec![Fed(values.clone()), Weight(scale()), zero(false)];
            cases.push(case("DequantizeLinear", 21, attributes, dequantize));
            let folded = vec![Constant(values.clone()), Constant(scale()), zero(false)];
            cases.push(case("DequantizeLinear", 21, attributes, folded));
            if !matches!(zero(true), Absent) {
                cases.push(case("QuantizeLinear", 21, attributes, vec![x(), Fed(scale()), zero(true)]));
            }
        }
        cases.push(case("QuantizeLinear", 21, attributes, vec![x(), Weight(scale()), Absent]));
    }
    for shift in [-15.0, 0.0, 100.0, -200.0] {
        let x = Fed(from(&[2, 3, 90], |i| ((i * 37) % 100) as f32 / 3.0 + shift));
        cases.push(several("DynamicQuantizeLinear", 17, &[], vec![x], 3));
    }
    cases.push(several("DynamicQuantizeLinear", 17, &[], vec![Fed(from(&[3], |_| 0f32))], 3));
    cases
}

fn crops(coordinates: &str) -> bool {
    coordinates == "tf_crop_and_resize"
}

pub(super) fn moves() -> Vec<Case> {
    let x = || Fed(noise(&[2, 3, 4, 6], 1));
    let numbers = |shape: &[usize]| Fed(from(shape, |i| i as i64 * 3 - 7));
    let bytes = |shape: &[usize]| Fed(from(shape, |i| i as u8));
    let mut cases = vec![
        case("Identity", 17, &[], vec![x()]),
        case("Identity", 17, &[], vec![Fed(from(&[3], |i| i == 1))]),
        case("Flatten", 17, &[("axis", int(2))], vec![x()]),
        case("Reshape", 17, &[], vec![x(), i64s(&[0, -1, 2])]),
        case("Squeeze", 17, &[], vec![Fed(noise(&[1, 3, 1], 1)), i64s(&[0])]),
        case("Unsqueeze", 17, &[], vec![x(), i64s(&[0, 5])]),
        case("Dropout", 17, &[], vec![x()]),
        case("Cast", 17, &[("to", int(10))], vec![x()]),
        case("Cast", 17, &[("to", int(7))], vec![numbers(&[4])]),
        case("Transpose", 17, &[], vec![x()]),
        case("Transpose", 17, &[("perm", ints(&[0, 2, 1, 3]))], vec![x()]),
        case("Transpose", 17, &[("perm", ints(&[0, 2, 3, 1]))], vec![Fed(noise(&[1, 40, 33, 35], 2))]),
        case("Transpose", 17, &[("perm", ints(&[4, 0, 3, 5, 1, 2]))], vec![numbers(&[2, 3, 2, 5, 4, 3])]),
        case("Transpose", 17, &[("perm", ints(&[1, 0]))], vec![bytes(&[50, 3])]),
        case("Transpose", 17, &[("perm", ints(&[1, 0]))], vec![Fed(from(&[5, 3], |i| i as u16))]),
        case(
            "Concat",
            17,
            &[("axis", int(1))],
            vec![x(), Fed(noise(&[2, 1, 4, 6], 2)), Weight(noise(&[2, 2, 4, 6], 3))],
        ),
        case("Concat", 17, &[("axis", int(-1))], (0..21).map(|i| numbers(&[3, i % 4 + 1])).collect()),
        case("Concat", 17, &[("axis", int(0))], vec![x()]),
        several("Split", 17, &[("axis", int(1))], vec![Fed(noise(&[2, 6, 3], 1)), i64s(&[1, 3, 2])], 3),
        several("Split", 18, &[("axis", int(-1)), ("num_outputs", int(4))], vec![numbers(&[2, 7])], 4),
        several("Split", 17, &[], vec![x()], 2),
        case("Slice", 17, &[], vec![x(), i64s(&[1, -5]), i64s(&[3, i64::MAX]), i64s(&[1, 3]), i64s(&[1, 2])]),
        case(
            "Slice",
            17,
            &[],
            vec![numbers(&[3, 7]), i64s(&[-1, 100]), i64s(&[i64::MIN, -6]), i64s(&[0, 1]), i64s(&[-1, -2])],
        ),
        case("Slice", 17, &[], vec![x(), i64s(&[1]), i64s(&[2])]),
        case("Slice", 9, &[("starts", ints(&[1])), ("ends", ints(&[-1])), ("axes", ints(&[2]))], vec![x()]),
        case("Expand", 17, &[], vec![Fed(noise(&[3, 1], 1)), i64s(&[2, 1, 6])]),
        case("Expand", 17, &[], vec![Fed(from(&[1], |_| true)), i64s(&[40])]),
        case("Tile", 17, &[], vec![numbers(&[2, 3]), i64s(&[2, 3])]),
        case("Gather", 17, &[("axis", int(1))], vec![x(), Fed(from(&[2, 2], |i| [0i64, 2, -1, 1][i]))]),
        case("Gather", 17, &[], vec![Weight(noise(&[9, 5], 1)), Fed(from(&[4], |i| [8i32, 0, 3, 3][i]))]),
        case("Gather", 17, &[("axis", int(2))], vec![numbers(&[2, 3, 4]), Constant(Tensor::scalar(-2i64))]),
        case("DepthToSpace", 17, &[("blocksize", int(2))], vec![Fed(noise(&[2, 8, 3, 5], 1))]),
        case(
            "DepthToSpace",
            17,
            &[("blocksize", int(2)), ("mode", text("CRD"))],
            vec![Fed(noise(&[2, 8, 3, 5], 1))],
        ),
        case("SpaceToDepth", 17, &[("blocksize", int(3))], vec![Fed(noise(&[1, 2, 6, 9], 1))]),
        case(
            "SpaceToDepth",
            17,
            &[("blocksize", int(3)), ("mode", text("CRD"))],
            vec![Fed(noise(&[1, 2, 6, 9], 1))],
        ),
    ];
    let scales = |s: &[f32]| Constant(from(&[s.len()], |i| s[i]));
    for (coordinates, nearest) in
        [("asymmetric", "floor"), ("half_pixel", "round_prefer_floor"), ("half_pixel", "round_prefer_ceil")]
    {
        let attributes =
            [("coordinate_transformation_mode", text(coordinates)), ("nearest_mode", text(nearest))];
        cases.push(case("Resize", 17, &attributes, vec![x(), Absent, scales(&[1.0, 1.0, 2.0, 3.0])]));
        cases.push(case("Resize", 17, &attributes, vec![x(), Absent, Absent, i64s(&[2, 3, 20, 6])]));
    }
    let attributes = [("coordinate_transformation_mode", text("asymmetric"))];
    cases.push(case("Resize", 17, &attributes, vec![x(), Absent, scales(&[1.0, 1.0, 2.0, 2.0])]));
    cases.push(case("Upsample", 9, &[], vec![x(), scales(&[1.0, 1.0, 2.0, 2.0])]));
    cases.push(case("Upsample", 9, &[("mode", text("linear"))], vec![x(), scales(&[1.0, 1.0, 2.5, 2.0])]));
    let transforms = [
        "half_pixel",
        "half_pixel_symmetric",
        "pytorch_half_pixel",
        "align_corners",
        "asymmetric",
        "tf_half_pixel_for_nn",
        "tf_crop_and_resize",
    ];
    for coordinates in transforms {
        for mode in ["nearest", "linear", "cubic"] {
            let mut attributes = vec![
                ("coordinate_transformation_mode", text(coordinates)),
                ("mode", text(mode)),
                ("extrapolation_value", float(-3.5)),
            ];
            let crops = crops(coordinates);
            let region = || if crops { scales(&[0.0, 0.0, 0.2, -0.3, 1.0, 1.0, 0.7, 1.2]) } else { Absent };
            let grow = || scales(&[1.0, 1.0, 1.6, 2.7]);
            cases.push(case("Resize", 19, &attributes, vec![x(), region(), grow()]));
            cases.push(case("Resize", 19, &attributes, vec![x(), region(), Absent, i64s(&[2, 3, 3, 13])]));
            if mode != "nearest" && !crops {
                attributes.push(("antialias", int(1)));
                attributes.push(("exclude_outside", int(1)));
                cases.push(case("Resize", 19, &attributes, vec![x(), Absent, scales(&[1.0, 0.7, 0.6, 0.4])]));
            }
            if !crops {
                let image = bytes(&[1, 2, 5, 9]);
                cases.push(case("Resize", 19, &attributes[..2], vec![image, Absent, grow()]));
                let image = Fed(from(&[1, 2, 5, 9], |i| i as i8 - 40));
                cases.push(case("Resize", 19, &attributes[..2], vec![image, Absent, grow()]));
            }
        }
        if !crops(coordinates) {
            let attributes =
                [("coordinate_transformation_mode", text(coordinates)), ("nearest_mode", text("ceil"))];
            cases.push(case(
                "Resize",
                19,
                &attributes,
                vec![numbers(&[1, 2, 5, 9]), Absent, scales(&[1.0, 1.0, 1.6, 0.7])],
            ));
        }
    }
    for tensor in [Tensor::from_i64s(&[1, 2, 3]), noise(&[2, 2], 1)] {
        let mut model = Model::new(17);
        let constant = model.node("Constant", &[("value", Attribute::Tensor(tensor.clone()))], &[]);
        let x = model.input(tensor);
        let y = model.node("Concat", &[("axis", int(0))], &[constant, x]);
        model.output(y);
        cases.push(Case { op: "Constant", model, tolerance: 0.0 });
    }
    cases
}
