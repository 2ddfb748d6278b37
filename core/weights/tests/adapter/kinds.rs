//! Every kind of module against its formula in f64.
//!
//! The bound: a merged value is a sum of products in f32, such as `W + s · scale · Σ up·down`. With u = 2⁻²⁴, the
//! error of a sum of n products is at most (n + a few) · u · M, where M is the same sum over the magnitudes of all
//! terms. No multiple of the *result* bounds the error, because terms may cancel. This is the worst case; in practice
//! roundings go both ways. So the tests allow two units in the last place of M, 2 · 2⁻²³ · M. They allow four times
//! that for a kind that multiplies two such sums or passes over the weight twice.

use crate::{
    fixtures::{Random, floats, merged, round, target},
    formulas::{Case, Parts, Sum, cases, file, plus, times},
};
use sdrun_abi::DType;
use sdrun_weights::{
    Component,
    adapter::{Delta, DoraRule, Kind, Merge, largest},
};

impl Case {
    fn apply(&self, sum: &Sum, strength: f64) -> Sum {
        Sum {
            value: (self.change)(&Parts(&self.file, false), &sum.value, strength),
            size: (self.change)(&Parts(&self.file, true), &sum.size, strength.abs()),
        }
    }

    fn deltas(&self) -> Vec<Delta> {
        let target = target(Component::Denoiser, &[("m.weight", &self.shape)], &[]);
        let resolution = self.file.open().unwrap().resolve(&target);
        assert_eq!(resolution.report.skipped, [], "{}", self.name);
        assert_eq!(resolution.report.applied[0].kind, self.kind, "{}", self.name);
        resolution.deltas["m.weight"].clone()
    }
}

fn assert_within(out: &[f32], expected: &Sum, units: f64, what: &str) {
    for (i, (out, value)) in out.iter().zip(&expected.value).enumerate() {
        let bound = units * 2f64.powi(-23) * expected.size[i];
        let off = (f64::from(*out) - value).abs();
        assert!(off <= bound, "{what}, element {i}: {out} instead of {value}, off by {off:e} > {bound:e}");
    }
}

fn base(count: usize) -> (Vec<f32>, Sum) {
    let base = Random::new(3).f32s(count);
    let value: Vec<f64> = base.iter().map(|v| f64::from(*v)).collect();
    let size = value.iter().map(|v| v.abs()).collect();
    (base, Sum { value, size })
}

#[test]
fn every_kind_is_its_formula() {
    for case in cases() {
        let deltas = case.deltas();
        let (base, sum) = base(case.shape.iter().product());
        for strength in [0.7f32, 1.0, -0.5] {
            let deltas: Vec<(&Delta, f32)> = deltas.iter().map(|d| (d, strength)).collect();
            let out = merged(&base, &case.shape, &deltas);
            let expected = case.apply(&sum, strength.into());
            assert_within(&out, &expected, case.units, &format!("{} at {strength}", case.name));
        }
        let deltas: Vec<(&Delta, f32)> = deltas.iter().map(|d| (d, 0.0)).collect();
        assert_eq!(merged(&base, &case.shape, &deltas), base, "{} at 0", case.name);
        assert!(Merge::new(&case.shape, &deltas).unwrap().is_identity());
    }
}

/// Applies the kinds one after another in the given order. The order matters for those that are not sums.
#[test]
fn stacks_are_applied_in_order() {
    let cases = cases();
    for (first, second) in cases.iter().flat_map(|a| cases.iter().map(move |b| (a, b))) {
        if first.shape != second.shape {
            continue;
        }
        let (base, sum) = base(first.shape.iter().product());
        let deltas = [first.deltas(), second.deltas()].concat();
        let deltas: Vec<(&Delta, f32)> = deltas.iter().zip([0.7, -0.5]).collect();
        let out = merged(&base, &first.shape, &deltas);
        let expected = second.apply(&first.apply(&sum, f64::from(0.7f32)), -0.5);
        let name = format!("{}, then {}", first.name, second.name);
        assert_within(&out, &expected, first.units + second.units, &name);
    }
}

/// m · V / ‖V‖ over each row, or each input, of V = W + s · ΔW (PEFT).
#[test]
fn dora_renormalizes() {
    for (name, shape, magnitude, key, per_output) in [
        ("rows", vec![24, 20], vec![24, 1], "dora_scale", true),
        ("inputs", vec![24, 20], vec![1, 20], "dora_scale", false),
        ("square rows", vec![20, 20], vec![20, 1], "dora_scale", true),
        ("square inputs", vec![20, 20], vec![1, 20], "dora_scale", false),
        ("rows of a convolution", vec![12, 6, 3, 3], vec![12, 1, 1, 1], "dora_scale", true),
        ("inputs of a convolution", vec![12, 6, 3, 3], vec![1, 6, 1, 1], "dora_scale", false),
        ("PEFT's rows", vec![24, 20], vec![24], "lora_magnitude_vector", true),
        ("PEFT's rows of a convolution", vec![12, 6, 3, 3], vec![1, 12, 1, 1], "lora_magnitude_vector", true),
    ] {
        let mut down = vec![4];
        down.extend(&shape[1..]);
        let file = file(
            &[("lora_down.weight", &down), ("lora_up.weight", &[shape[0], 4]), (key, &magnitude)],
            Some(2.0),
        );
        let target = target(Component::Denoiser, &[("m.weight", &shape)], &[]);
        let adapter = file.open().unwrap();
        let resolution = adapter.resolve_with(&target, Some(DoraRule::Peft));
        assert_eq!(resolution.report.applied[0].dora, Some(DoraRule::Peft), "{name}");
        let own = if key == "dora_scale" { DoraRule::ComfyUi } else { DoraRule::Peft };
        let by_spelling = adapter.resolve(&target);
        assert_eq!(by_spelling.report.applied[0].dora, Some(own), "{name}");
        assert_eq!(by_spelling.deltas["m.weight"][0].dora(), Some(own), "{name}");
        let (base, sum) = base(shape.iter().product());
        let (columns, kernel) = (base.len() / shape[0], shape[2..].iter().product::<usize>());
        for strength in [0.7f32, 1.0, -0.5] {
            let parts = |absolute| {
                let p = Parts(&file, absolute);
                times(&p.matrix("lora_up.weight"), &p.matrix("lora_down.weight")).0
            };
            let s = f64::from(strength);
            let v = Sum {
                value: plus(&sum.value, s, 0.5, &parts(false)),
                size: plus(&sum.size, s.abs(), 0.5, &parts(true)),
            };
            let group = |i: usize| if per_output { i / columns } else { i % columns / kernel };
            let mut norms = vec![0f64; 64];
            v.value.iter().enumerate().for_each(|(i, v)| norms[group(i)] += v * v);
            let m = file.values(&format!("lora_unet_m.{key}"));
            let scaled = |values: &[f64], sign: fn(f64) -> f64| {
                values
                    .iter()
                    .enumerate()
                    .map(|(i, v)| v * sign(m[group(i)]) / norms[group(i)].sqrt())
                    .collect()
            };
            let expected = Sum { value: scaled(&v.value, |m| m), size: scaled(&v.size, f64::abs) };
            let delta = &resolution.deltas["m.weight"][0];
            assert!(!delta.is_additive());
            assert_eq!(Merge::new(&shape, &[(delta, 1.0)]).unwrap().is_row_local(), per_output, "{name}");
            assert_within(
                &merged(&base, &shape, &[(delta, strength)]),
                &expected,
                8.0,
                &format!("{name} at {strength}"),
            );
        }
        assert_eq!(merged(&base, &shape, &[(&resolution.deltas["m.weight"][0], 0.0)]), base, "{name}");
    }
}

/// The Cayley transform of a 2x2 block is known: B - Bᵀ = [[0, q], [-q, 0]] rotates by the angle 2·atan(q).
#[test]
fn oft_rotates_blocks_of_rows() {
    for (constraint, rescaled) in [(0.0, false), (0.0, true), (0.0625, false)] {
        let mut file = file(&[("oft_blocks", &[3, 2, 2])], Some(constraint));
        if rescaled {
            file = file.random("lora_unet_m.rescale", &[6, 1]);
        }
        let shape = [6, 7];
        let target = target(Component::Denoiser, &[("m.weight", &shape)], &[]);
        let resolution = file.open().unwrap().resolve(&target);
        let delta = &resolution.deltas["m.weight"][0];
        let (base, sum) = base(42);
        let blocks = file.values("lora_unet_m.oft_blocks");
        let q: Vec<f64> = blocks.chunks(4).map(|b| b[1] - b[2]).collect();
        let norm = (2.0 * q.iter().map(|q| q * q).sum::<f64>()).sqrt();
        let limit = constraint * 6.0;
        assert!(constraint == 0.0 || norm > limit, "the constraint has to matter");
        let shrink = if constraint > 0.0 { limit / norm } else { 1.0 };
        for strength in [0.7f32, 1.0, -0.5] {
            let s = f64::from(strength);
            let mut expected = Sum { value: vec![0.0; 42], size: vec![0.0; 42] };
            for at in 0..42 {
                let (row, column) = (at / 7, at % 7);
                let angle = 2.0 * (q[row / 2] * shrink).atan();
                // (I + Q)(I - Q)⁻¹ is [[cos, sin], [-sin, cos]]. Its transpose mixes the rows.
                let (cos, sin) = (s * angle.cos() + 1.0 - s, s * angle.sin());
                let other = (row ^ 1) * 7 + column;
                let sign = if row % 2 == 0 { -1.0 } else { 1.0 };
                let factor =
                    if rescaled { 1.0 + s * (file.values("lora_unet_m.rescale")[row] - 1.0) } else { 1.0 };
                expected.value[at] = factor * (cos * sum.value[at] + sign * sin * sum.value[other]);
                expected.size[at] = factor.abs() * (cos.abs() * sum.size[at] + sin.abs() * sum.size[other]);
            }
            let out = merged(&base, &shape, &[(delta, strength)]);
            assert_within(
                &out,
                &expected,
                8.0,
                &format!("constraint {constraint}, rescaled {rescaled}, at {strength}"),
            );
        }
    }
}

/// Merging any range of rows, from any type to any other, gives the same rows as merging the whole tensor.
#[test]
fn rows_and_types_agree_with_the_whole() {
    let types = [DType::F32, DType::F16, DType::BF16, DType::F64];
    for case in cases() {
        let deltas = case.deltas();
        let deltas: Vec<(&Delta, f32)> = deltas.iter().map(|d| (d, 0.7)).collect();
        let merge = Merge::new(&case.shape, &deltas).unwrap();
        let (rows, count) = (case.shape[0], case.shape.iter().product::<usize>());
        for (from, to) in types.iter().flat_map(|a| types.map(|b| (*a, b))) {
            let values: Vec<f64> = base(count).1.value.iter().map(|v| round(from, *v)).collect();
            let source = crate::fixtures::bytes(from, &values);
            let single: Vec<f32> = values.iter().map(|v| *v as f32).collect();
            let expected = merged(&single, &case.shape, &deltas);
            // The others depend on the weight.
            let bounded = !matches!(case.kind, Kind::Glora | Kind::Ia3 | Kind::Oft);
            let fits = from != DType::F64 && (bounded || matches!(to, DType::F32 | DType::F64));
            let found = merge.surely_fits(from, to, || largest(&source, from));
            assert_eq!(found, fits, "{} {from} to {to}", case.name);
            let mut out = vec![0u8; count * to.size()];
            for range in [0..5, 5..6, 6..rows] {
                let [a, b] = [from, to]
                    .map(|t| range.start * count / rows * t.size()..range.end * count / rows * t.size());
                merge.rows(range, (from, &source[a]), (to, &mut out[b])).unwrap();
            }
            let mut strips = Vec::new();
            let mut take = |_, strip: &[u8]| {
                strips.extend_from_slice(strip);
                Ok(())
            };
            assert!(merge.strips((from, &source), to, 3, &mut take).unwrap());
            assert_eq!(strips.len(), out.len(), "{}", case.name);
            let found = floats(to, &out).into_iter().chain(floats(to, &strips));
            for (out, whole) in found.zip(expected.iter().chain(&expected)) {
                // Allow one rounding step of the type, because the height of a block may change the order of a sum.
                let step = [(DType::F16, 11), (DType::BF16, 8)]
                    .iter()
                    .find(|(t, _)| *t == to)
                    .map_or(22, |(_, n)| *n);
                let bound = 2f64.powi(-step) * f64::from(whole.abs()) * 1.001 + 2e-6;
                assert!(
                    (out - f64::from(*whole)).abs() <= bound,
                    "{} {from} to {to}: {out} for {whole}",
                    case.name
                );
            }
        }
    }
}
