use super::{
    rewrite::{fused_node, rewrite},
    uses::{Uses, pairs},
};
use crate::{Attribute, Graph, Node, ValueId};

/// Fuses x · sigmoid(alpha · x) into `Swish`; alpha is 1 or a scalar constant. Returns the number of fused nodes.
pub fn fuse_swish(graph: &mut Graph) -> usize {
    rewrite(graph, |uses, _, n| {
        let (x, alpha) = swish(uses, n)?;
        Some(vec![fused_node(n, "Swish", &[x], [("alpha", Attribute::Float(alpha))])])
    })
}

fn swish(uses: &Uses<'_>, n: &Node) -> Option<(ValueId, f32)> {
    (n.op_type == "Mul" && n.domain.is_empty()).then_some(())?;
    pairs(n)?.into_iter().find_map(|(x, gate)| {
        let inner = uses.made_by(gate, "Sigmoid")?.input(0)?;
        if inner == x {
            return Some((x, 1.0));
        }
        let (scaled, alpha) = uses.scaled(uses.producer(inner)?)?;
        (scaled == x).then_some((x, alpha))
    })
}

/// Fuses GELU into `Gelu`: x · ½ · (1 + erf(x / √2)) and x · ½ · (1 + tanh(√(2/π) · (x + 0.044715 · x³))), with the
/// factors in any order. Returns the number of fused nodes.
pub fn fuse_gelu(graph: &mut Graph) -> usize {
    rewrite(graph, |uses, _, n| {
        let (x, approximate) = gelu(uses, n)?;
        let attributes = [("approximate", Attribute::String(approximate.into()))];
        Some(vec![fused_node(n, "Gelu", &[x], attributes)])
    })
}

fn gelu(uses: &Uses<'_>, n: &Node) -> Option<(ValueId, &'static str)> {
    (n.op_type == "Mul" && n.domain.is_empty()).then_some(())?;
    let mut factors = vec![n.input(0)?, n.input(1)?];
    for id in [n.input(0)?, n.input(1)?] {
        if let Some(product) = uses.made_by(id, "Mul") {
            factors.retain(|factor| *factor != id);
            factors.extend([product.input(0)?, product.input(1)?]);
        }
    }
    // The cube of x is a product too.
    (factors.len() <= 4).then_some(())?;
    let half = factors.iter().position(|id| uses.is_scalar(*id, 0.5))?;
    factors.remove(half);
    let &[a, b] = &factors[..] else { return None };
    [(a, b), (b, a)].into_iter().find_map(|(x, gate)| {
        let sum = uses.made_by(gate, "Add")?;
        let (curve, _) = pairs(sum)?.into_iter().find(|(_, one)| uses.is_scalar(*one, 1.0))?;
        if let Some(erf) = uses.made_by(curve, "Erf") {
            let (scaled, factor) = uses.scaled(uses.producer(erf.input(0)?)?)?;
            let fits = scaled == x && close(factor, std::f32::consts::FRAC_1_SQRT_2);
            return fits.then_some((x, "none"));
        }
        let (inner, factor) = uses.scaled(uses.producer(uses.made_by(curve, "Tanh")?.input(0)?)?)?;
        // √(2/π)
        close(factor, 0.797_884_6).then_some(())?;
        let (_, cubic) = pairs(uses.made_by(inner, "Add")?)?.into_iter().find(|(linear, _)| *linear == x)?;
        let (cube, factor) = uses.scaled(uses.producer(cubic)?)?;
        (close(factor, 0.044_715) && is_cube(uses, cube, x)).then_some((x, "tanh"))
    })
}

/// Half-precision exports were often rounded twice, via bf16.
fn close(found: f32, expected: f32) -> bool {
    (found - expected).abs() <= 2e-3 * expected
}

fn is_cube(uses: &Uses<'_>, id: ValueId, x: ValueId) -> bool {
    let Some(node) = uses.producer(id).filter(|node| node.domain.is_empty()) else { return false };
    let is_square = |id: ValueId| match uses.producer(id) {
        Some(square) if square.op_type == "Mul" => square.inputs == [Some(x), Some(x)],
        Some(square) if square.op_type == "Pow" => {
            square.input(0) == Some(x) && square.input(1).is_some_and(|c| uses.is_scalar(c, 2.0))
        }
        _ => false,
    };
    match &*node.op_type {
        "Pow" => node.input(0) == Some(x) && node.input(1).is_some_and(|c| uses.is_scalar(c, 3.0)),
        "Mul" => pairs(node).is_some_and(|pairs| pairs.into_iter().any(|(a, b)| a == x && is_square(b))),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Tensor,
        passes::testing::{check, ops},
        testing::{Model, model},
    };
    use sdrun_abi::DType;

    fn file() -> Model {
        let mut file = model(17).input("x", DType::F32, "n 6").output("y", "n 6");
        let constants = [
            ("half", 0.5f32),
            ("one", 1.0),
            ("root", 2f32.sqrt()),
            ("inverse", 0.5f32.sqrt()),
            ("outer", 0.797_884_6),
            ("cubic", 0.044_715),
            ("three", 3.0),
            ("other", 0.4),
            ("quick", 1.702),
        ];
        for (name, value) in constants {
            file = file.initializer(name, &Tensor::scalar(value));
        }
        file
    }

    #[test]
    fn swish_with_and_without_a_factor() {
        let silu = file().node("Sigmoid", &["x"], &["s"]).node("Mul", &["s", "x"], &["y"]);
        assert_eq!(ops(&check(&silu, fuse_swish, 1)), ["Swish"]);
        let quick = file().node("Mul", &["quick", "x"], &["q"]).node("Sigmoid", &["q"], &["s"]).node(
            "Mul",
            &["x", "s"],
            &["y"],
        );
        let graph = check(&quick, fuse_swish, 1);
        assert_eq!(ops(&graph), ["Swish"]);
        assert_eq!(graph.nodes[0].float("alpha"), Some(1.702));
        let gate = file().node("Exp", &["x"], &["e"]).node("Sigmoid", &["e"], &["s"]).node(
            "Mul",
            &["x", "s"],
            &["y"],
        );
        check(&gate, fuse_swish, 0);
        let used = file().node("Sigmoid", &["x"], &["s"]).node("Mul", &["s", "x"], &["y"]).output("s", "n 6");
        assert_eq!(ops(&check(&used, fuse_swish, 1)), ["Sigmoid", "Swish"]);
    }

    #[test]
    fn gelu_by_erf_in_any_order() {
        for order in 0..3 {
            let scaled = match order {
                0 => file().node("Div", &["x", "root"], &["d"]),
                _ => file().node("Mul", &["inverse", "x"], &["d"]),
            };
            let gate = scaled.node("Erf", &["d"], &["e"]).node("Add", &["one", "e"], &["g"]);
            let whole = match order {
                0 => gate.node("Mul", &["x", "g"], &["p"]).node("Mul", &["p", "half"], &["y"]),
                1 => gate.node("Mul", &["half", "x"], &["p"]).node("Mul", &["p", "g"], &["y"]),
                _ => gate.node("Mul", &["g", "half"], &["p"]).node("Mul", &["x", "p"], &["y"]),
            };
            assert_eq!(ops(&check(&whole, fuse_gelu, 1)), ["Gelu"], "order {order}");
        }
    }

    #[test]
    fn gelu_by_tanh_with_either_cube() {
        for power in [false, true] {
            let cube = match power {
                true => file().node("Pow", &["x", "three"], &["c"]),
                false => file().node("Mul", &["x", "x"], &["s"]).node("Mul", &["x", "s"], &["c"]),
            };
            let file = cube
                .node("Mul", &["cubic", "c"], &["cc"])
                .node("Add", &["x", "cc"], &["sum"])
                .node("Mul", &["outer", "sum"], &["inner"])
                .node("Tanh", &["inner"], &["t"])
                .node("Add", &["one", "t"], &["g"])
                .node("Mul", &["x", "g"], &["p"])
                .node("Mul", &["half", "p"], &["y"]);
            let graph = check(&file, fuse_gelu, 1);
            assert_eq!(ops(&graph), ["Gelu"]);
            assert_eq!(graph.nodes[0].str("approximate"), Some("tanh"));
        }
    }

    #[test]
    fn look_alikes_are_left_alone() {
        let file = file()
            .node("Div", &["x", "root"], &["d"])
            .node("Erf", &["d"], &["e"])
            .node("Add", &["e", "one"], &["g"])
            .node("Mul", &["x", "g"], &["p"])
            .node("Mul", &["p", "other"], &["y"]);
        check(&file, fuse_gelu, 0);
    }
}
