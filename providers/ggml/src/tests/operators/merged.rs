//! Fused operators, and forms of operators that passes merge.

use super::*;

/// Operators that kernels fuse with a product or with attention.
pub(super) fn merged() -> Vec<Case> {
    let x = |shape: &[usize]| Fed(noise(shape, 1));
    let weight = |shape: &[usize], seed| Weight(noise(shape, seed));
    let heads = [("q_num_heads", int(4)), ("kv_num_heads", int(4)), ("scale", float(0.3))];
    let shared = [("q_num_heads", int(4)), ("kv_num_heads", int(2))];
    let causal = [("is_causal", int(1))];
    let halves = [("activation", text("Gelu")), ("gate", int(1))];
    let six = [("activation", text("Clip")), ("activation_params", Attribute::Floats(vec![0.0, 6.0]))];
    let silu = [("activation", text("Swish")), ("activation_params", Attribute::Floats(vec![1.0]))];
    let pads = [("pads", ints(&[1, 1, 1, 1])), silu[0].clone(), silu[1].clone()];
    let turned = [("transB", int(1)), ("activation", text("FastGelu"))];
    let groups = [("num_groups", int(3)), ("epsilon", float(1e-3)), silu[0].clone(), silu[1].clone()];
    let image = || x(&[2, 6, 5, 7]);
    let filters = || weight(&[9, 6, 3, 3], 2);
    let mut cases = vec![
        case(
            "Attention",
            23,
            &heads,
            vec![x(&[2, 7, 20]), Fed(noise(&[2, 9, 20], 2)), Fed(noise(&[2, 9, 12], 3))],
        ),
        case(
            "Attention",
            23,
            &shared,
            vec![x(&[1, 7, 20]), Fed(noise(&[1, 9, 10], 2)), Fed(noise(&[1, 9, 6], 3))],
        ),
        case(
            "Attention",
            23,
            &[],
            vec![
                x(&[2, 3, 7, 5]),
                Fed(noise(&[2, 3, 9, 5], 2)),
                Fed(noise(&[2, 3, 9, 4], 3)),
                Fed(noise(&[1, 7, 9], 4)),
            ],
        ),
        case(
            "Attention",
            23,
            &causal,
            vec![x(&[1, 2, 70, 5]), Fed(noise(&[1, 2, 70, 5], 2)), Fed(noise(&[1, 2, 70, 4], 3))],
        ),
        case("RMSNormalization", 23, &[("axis", int(-1))], vec![x(&[3, 40]), weight(&[40], 2)]),
        case("Swish", 24, &[("alpha", float(1.702))], vec![x(&[3, 40])]),
        case("Gelu", 20, &[("approximate", text("tanh"))], vec![x(&[3, 40])]),
        case("GLU", 17, &halves, vec![x(&[3, 5, 44])]),
        case("FusedConv", 17, &pads, vec![image(), filters(), weight(&[9], 3), Fed(noise(&[2, 9, 5, 7], 4))]),
        case("FusedConv", 17, &pads, vec![image(), filters(), Absent, Fed(noise(&[2, 9, 1, 1], 4))]),
        case("FusedConv", 17, &pads, vec![image(), filters(), Absent, Fed(noise(&[5, 1], 4))]),
        case("FusedMatMul", 17, &six, vec![x(&[2, 3, 20]), weight(&[20, 9], 2), weight(&[9], 3)]),
        case(
            "FusedMatMul",
            17,
            &turned,
            vec![x(&[2, 3, 20]), weight(&[9, 20], 2), weight(&[9], 3), Fed(noise(&[2, 3, 9], 4))],
        ),
        case(
            "FusedMatMul",
            17,
            &[],
            vec![x(&[2, 3, 20]), weight(&[20, 9], 2), Absent, Fed(noise(&[3, 1], 4))],
        ),
        case(
            "GroupNormalization",
            17,
            &groups,
            vec![image(), weight(&[6], 2), weight(&[6], 3), weight(&[3], 4), weight(&[3], 5)],
        ),
    ];
    for case in &mut cases {
        let plain = matches!(case.op, "Attention" | "RMSNormalization" | "Swish" | "Gelu");
        if !plain {
            case.model.graph.nodes[0].domain = DOMAIN.into();
            case.model.graph.opsets.insert(DOMAIN.into(), VERSION);
        }
    }
    cases
}

pub(super) fn pads() -> Vec<Case> {
    let x = || Fed(noise(&[2, 3, 4, 5], 1));
    let mut cases = Vec::new();
    for mode in ["constant", "edge", "reflect"] {
        let attributes = [("mode", text(mode))];
        cases.push(case("Pad", 18, &attributes, vec![x(), i64s(&[0, 1, 2, 3, 0, 0, 1, 2])]));
        cases.push(case("Pad", 18, &attributes, vec![x(), i64s(&[0, 0, 0, 0, 0, 0, 1, 1])]));
        cases.push(case("Pad", 18, &attributes, vec![x(), i64s(&[0, 0, -1, 2, 0, 0, 1, -2])]));
    }
    let value = || Constant(Tensor::scalar(2.5f32));
    cases.push(case("Pad", 18, &[], vec![x(), i64s(&[1, 2, 1, 0]), value(), i64s(&[0, -1])]));
    cases.push(case("Pad", 19, &[("mode", text("wrap"))], vec![x(), i64s(&[0, 0, 3, 1, 0, 0, 2, 4])]));
    cases.push(case(
        "Pad",
        9,
        &[("pads", ints(&[0, 1, 0, 1])), ("value", float(-1.0))],
        vec![Fed(noise(&[3, 4], 1))],
    ));
    cases.push(case("Pad", 18, &[], vec![Fed(from(&[3], |i| i as i64)), i64s(&[1, 1])]));
    cases
}

pub(super) fn sums() -> Vec<Case> {
    let sum = |equation: &str, shapes: &[&[usize]]| {
        let inputs = shapes.iter().enumerate().map(|(i, shape)| Fed(noise(shape, i as u64))).collect();
        case("Einsum", 17, &[("equation", text(equation))], inputs)
    };
    vec![
        sum("nhwpqc->nchpwq", &[&[2, 3, 4, 2, 2, 5]]),
        sum("ij->j", &[&[3, 4]]),
        sum("m,d->md", &[&[7], &[9]]),
        sum("bhid,bhjd->bhij", &[&[2, 3, 4, 5], &[2, 3, 6, 5]]),
        sum("bij, bjk -> kbi", &[&[2, 3, 4], &[2, 4, 5]]),
        sum("ij,kj->k", &[&[2, 3], &[4, 3]]),
    ]
}

pub(super) fn fused() -> Vec<Case> {
    let activation = |name: &str| ("activation", text(name));
    let swish = [activation("Swish"), ("activation_params", Attribute::Floats(vec![1.702]))];
    let fed = |shape: &[usize], seed| Fed(noise(shape, seed));
    let weight = |shape: &[usize], seed| Weight(noise(shape, seed));
    let mut cases = vec![
        case("Swish", 1, &[("alpha", float(1.702))], vec![fed(&[3, 40], 1)]),
        case("Gelu", 1, &[("approximate", text("tanh"))], vec![fed(&[3, 40], 1)]),
        case("RMSNormalization", 1, &[("epsilon", float(1e-3))], vec![fed(&[2, 3, 40], 1), weight(&[40], 2)]),
        case("GLU", 1, &[("gate", int(1)), activation("Gelu")], vec![fed(&[2, 3, 40], 1)]),
        case("RotatePairs", 1, &[], vec![fed(&[2, 5, 3, 38], 1), fed(&[1, 5, 1, 38], 2), fed(&[38], 3)]),
        case("GLU", 1, &[("gate", int(0)), activation("FastGelu")], vec![fed(&[2, 3, 40], 1)]),
        case(
            "FusedMatMul",
            1,
            &swish,
            vec![fed(&[2, 3, 12], 1), weight(&[12, 7], 2), weight(&[7], 3), fed(&[2, 3, 7], 4)],
        ),
        case("FusedMatMul", 1, &[("transB", int(1))], vec![fed(&[3, 12], 1), weight(&[7, 12], 2)]),
        case(
            "FusedMatMul",
            1,
            &[("transB", int(1))],
            vec![fed(&[3, 12], 1), fed(&[7, 12], 2), weight(&[7], 3)],
        ),
        case(
            "FusedConv",
            1,
            &[("pads", ints(&[1; 4])), activation("Relu")],
            vec![fed(&[2, 3, 5, 6], 1), weight(&[4, 3, 3, 3], 2), weight(&[4], 3), fed(&[2, 4, 1, 1], 4)],
        ),
        case(
            "FusedConv",
            1,
            &[activation("Clip"), ("activation_params", Attribute::Floats(vec![-0.1, 0.2]))],
            vec![fed(&[2, 3, 5, 6], 1), weight(&[4, 3, 1, 1], 2), Absent, fed(&[2, 4, 5, 6], 4)],
        ),
        case(
            "NhwcConv",
            1,
            &[("pads", ints(&[0, 2, 1, 1])), ("dilations", ints(&[1, 2])), ("strides", ints(&[2, 1]))],
            vec![fed(&[2, 9, 8, 3], 1), weight(&[5, 3, 3, 3], 2), weight(&[5], 3)],
        ),
        case(
            "NhwcConv",
            1,
            &[activation("Gelu")],
            vec![fed(&[2, 5, 6, 20], 1), weight(&[7, 20, 1, 1], 2), Absent, fed(&[2, 5, 6, 7], 4)],
        ),
        case("NhwcConv", 1, &[], vec![fed(&[1, 5, 6, 20], 1), fed(&[7, 20, 1, 1], 2), weight(&[7], 3)]),
        case(
            "NhwcConv",
            1,
            &[("group", int(20)), ("pads", ints(&[1; 4])), activation("Relu")],
            vec![fed(&[2, 5, 6, 20], 1), weight(&[20, 1, 3, 3], 2), weight(&[20], 3), fed(&[1, 20], 4)],
        ),
    ];
    let heads = [("q_num_heads", int(3)), ("kv_num_heads", int(3)), ("scale", float(0.3))];
    let joined = |keys: usize| vec![fed(&[2, 9, 12], 1), fed(&[2, keys, 12], 2), fed(&[2, keys, 12], 3)];
    cases.push(case("Attention", 1, &heads, joined(7)));
    let mut masked = joined(7);
    masked.push(fed(&[2, 1, 9, 7], 4));
    cases.push(case("Attention", 1, &heads, masked));
    // The first queries attend to every third key and their own, the others to none.
    let sees = |queries: usize| {
        let sees = |i: usize| i / 7 % 9 < queries && (i.is_multiple_of(3) || i / 7 % 9 == i % 7);
        let seen: Vec<bool> = (0..2 * 9 * 7).map(sees).collect();
        Tensor::from_elements(vec![2, 1, 9, 7], &seen).unwrap()
    };
    for mask in [Fed(sees(8)), Constant(sees(8)), Constant(sees(9))] {
        cases.push(case("Attention", 1, &heads, joined(7).into_iter().chain([mask]).collect()));
    }
    let apart = vec![fed(&[2, 3, 9, 4], 1), fed(&[2, 3, 7, 4], 2), fed(&[2, 3, 7, 6], 3)];
    cases.push(case("Attention", 1, &[], apart));
    for case in &mut cases {
        case.model.graph.opsets = BTreeMap::from([(String::new(), 17), (DOMAIN.to_owned(), VERSION)]);
        case.model.graph.nodes[0].domain = DOMAIN.into();
    }
    cases
}
