//! Every kind of module against its formula in f64.
//!
//! The bound. A merged value is a sum of products in f32, `W + s · scale · Σ up·down` and the like. With u = 2⁻²⁴, a sum
//! of n products is off by at most (n + a few) · u · M, where M is the same sum with all terms' magnitudes: no
//! multiple of the *result* bounds it, since terms may cancel. That is the worst case; roundings fall both ways, and
//! what is asserted is two units in the last place of M, 2 · 2⁻²³ · M, or four times that where a kind multiplies
//! two such sums, or goes over the weight twice.

use crate::fixtures::{File, Random, floats, merged, round, target};
use sdrun_abi::DType;
use sdrun_weights::{
    Component,
    adapter::{Delta, Kind, Merge},
};

/// Values of a tensor, and the magnitudes that their bound needs.
#[derive(Clone)]
struct Sum {
    value: Vec<f64>,
    size: Vec<f64>,
}

/// A matrix in f64.
type Matrix = (Vec<f64>, usize, usize);

fn times((a, m, k): &Matrix, (b, l, n): &Matrix) -> Matrix {
    assert_eq!(k, l);
    let mut out = vec![0.0; m * n];
    for i in 0..*m {
        for j in 0..*n {
            out[i * n + j] = (0..*k).map(|x| a[i * k + x] * b[x * n + j]).sum();
        }
    }
    (out, *m, *n)
}

/// The tensors of a module as they are, or all as their magnitudes.
struct Parts<'a>(&'a File, bool);

impl Parts<'_> {
    fn matrix(&self, slot: &str) -> Matrix {
        let tensor = &self.0.tensors[&format!("lora_unet_m.{slot}")];
        let values: Vec<f64> = tensor.values.iter().map(|v| if self.1 { v.abs() } else { *v }).collect();
        let rows = tensor.shape[0];
        let columns = values.len() / rows;
        (values, rows, columns)
    }
    /// `[p, (r, kl)]` of `Σ_ij t[i,j,kl] · a[i,p] · b[j,r]`.
    fn tucker(&self, t: &str, a: &Matrix, b: &Matrix) -> Matrix {
        let (t, _, _) = self.matrix(t);
        let (ranks, kernel) = ((a.1, b.1), t.len() / (a.1 * b.1));
        let mut out = vec![0.0; a.2 * b.2 * kernel];
        for p in 0..a.2 {
            for r in 0..b.2 {
                for k in 0..kernel {
                    for i in 0..ranks.0 {
                        for j in 0..ranks.1 {
                            out[(p * b.2 + r) * kernel + k] +=
                                t[(i * ranks.1 + j) * kernel + k] * a.0[i * a.2 + p] * b.0[j * b.2 + r];
                        }
                    }
                }
            }
        }
        (out, a.2, b.2 * kernel)
    }
}

fn transposed((a, m, n): Matrix) -> Matrix {
    ((0..n).flat_map(|j| (0..m).map(move |i| (i, j))).map(|(i, j)| a[i * n + j]).collect(), n, m)
}

/// A case: the shape of the weight, the file, and the change as a function of tensors, weight and strength.
struct Case {
    name: &'static str,
    kind: Kind,
    shape: Vec<usize>,
    file: File,
    /// Units of 2⁻²³ · M allowed.
    units: f64,
    change: Box<dyn Fn(&Parts, &[f64], f64) -> Vec<f64>>,
}

/// W + s · factor · delta.
fn plus(w: &[f64], s: f64, factor: f64, delta: &[f64]) -> Vec<f64> {
    w.iter().zip(delta).map(|(w, d)| w + s * factor * d).collect()
}

fn file(tensors: &[(&str, &[usize])], alpha: Option<f64>) -> File {
    let file = tensors
        .iter()
        .fold(File::default(), |f, (slot, shape)| f.random(&format!("lora_unet_m.{slot}"), shape));
    alpha.into_iter().fold(file, |f, alpha| f.number("lora_unet_m.alpha", alpha))
}

fn cases() -> Vec<Case> {
    let (linear, conv) = (vec![24, 20], vec![12, 6, 3, 3]);
    let mut cases = Vec::new();
    let mut add =
        |name, kind, shape: &[usize], file, units, change: Box<dyn Fn(&Parts, &[f64], f64) -> Vec<f64>>| {
            cases.push(Case { name, kind, shape: shape.to_vec(), file, units, change });
        };
    add(
        "LoRA, rank 16",
        Kind::Lora,
        &linear,
        file(&[("lora_down.weight", &[16, 20]), ("lora_up.weight", &[24, 16])], Some(8.0)),
        2.0,
        Box::new(|p, w, s| {
            plus(w, s, 0.5, &times(&p.matrix("lora_up.weight"), &p.matrix("lora_down.weight")).0)
        }),
    );
    add(
        "LoRA, rank 1, no alpha",
        Kind::Lora,
        &linear,
        file(&[("lora_down.weight", &[1, 20]), ("lora_up.weight", &[24, 1])], None),
        2.0,
        Box::new(|p, w, s| {
            plus(w, s, 1.0, &times(&p.matrix("lora_up.weight"), &p.matrix("lora_down.weight")).0)
        }),
    );
    add(
        "LoRA of a convolution",
        Kind::Lora,
        &conv,
        file(&[("lora_down.weight", &[5, 6, 3, 3]), ("lora_up.weight", &[12, 5, 1, 1])], Some(2.0)),
        2.0,
        Box::new(|p, w, s| {
            plus(w, s, 0.4, &times(&p.matrix("lora_up.weight"), &p.matrix("lora_down.weight")).0)
        }),
    );
    add(
        "LoRA with a core",
        Kind::Tucker,
        &conv,
        file(
            &[
                ("lora_down.weight", &[4, 6, 1, 1]),
                ("lora_up.weight", &[12, 5, 1, 1]),
                ("lora_mid.weight", &[5, 4, 3, 3]),
            ],
            Some(2.0),
        ),
        2.0,
        Box::new(|p, w, s| {
            let up = transposed(p.matrix("lora_up.weight"));
            plus(w, s, 0.5, &p.tucker("lora_mid.weight", &up, &p.matrix("lora_down.weight")).0)
        }),
    );
    add(
        "LoRA scaled by a tensor",
        Kind::Lora,
        &linear,
        file(&[("lora_down.weight", &[4, 20]), ("lora_up.weight", &[24, 4])], Some(1.0))
            .number("lora_unet_m.scale", 0.75),
        2.0,
        Box::new(|p, w, s| {
            plus(w, s, 0.75, &times(&p.matrix("lora_up.weight"), &p.matrix("lora_down.weight")).0)
        }),
    );
    add(
        "rank-stabilized LoRA",
        Kind::Lora,
        &linear,
        file(&[("lora_down.weight", &[16, 20]), ("lora_up.weight", &[24, 16])], Some(2.0))
            .say("ss_network_args", r#"{"rs_lora": "True"}"#),
        2.0,
        Box::new(|p, w, s| {
            plus(w, s, 0.5, &times(&p.matrix("lora_up.weight"), &p.matrix("lora_down.weight")).0)
        }),
    );
    let hada: &[(&str, &[usize])] =
        &[("hada_w1_a", &[24, 3]), ("hada_w1_b", &[3, 20]), ("hada_w2_a", &[24, 3]), ("hada_w2_b", &[3, 20])];
    add(
        "LoHa",
        Kind::Loha,
        &linear,
        file(hada, Some(1.5)),
        8.0,
        Box::new(|p, w, s| {
            let [a, b] =
                [1, 2].map(|i| times(&p.matrix(&format!("hada_w{i}_a")), &p.matrix(&format!("hada_w{i}_b"))));
            let delta: Vec<f64> = a.0.iter().zip(&b.0).map(|(a, b)| a * b).collect();
            plus(w, s, 0.5, &delta)
        }),
    );
    let hada: &[(&str, &[usize])] = &[
        ("hada_w1_a", &[3, 12]),
        ("hada_w1_b", &[3, 6]),
        ("hada_t1", &[3, 3, 3, 3]),
        ("hada_w2_a", &[3, 12]),
        ("hada_w2_b", &[3, 6]),
        ("hada_t2", &[3, 3, 3, 3]),
    ];
    add(
        "LoHa with cores",
        Kind::Loha,
        &conv,
        file(hada, Some(1.5)),
        8.0,
        Box::new(|p, w, s| {
            let [a, b] = [1, 2].map(|i| {
                p.tucker(
                    &format!("hada_t{i}"),
                    &p.matrix(&format!("hada_w{i}_a")),
                    &p.matrix(&format!("hada_w{i}_b")),
                )
            });
            let delta: Vec<f64> = a.0.iter().zip(&b.0).map(|(a, b)| a * b).collect();
            plus(w, s, 0.5, &delta)
        }),
    );
    fn kron(one: &Matrix, two: &Matrix) -> Vec<f64> {
        let (columns, mut out) = (one.2 * two.2, vec![0.0; one.0.len() * two.0.len()]);
        for row in 0..one.1 * two.1 {
            for column in 0..columns {
                out[row * columns + column] =
                    one.0[row / two.1 * one.2 + column / two.2] * two.0[row % two.1 * two.2 + column % two.2];
            }
        }
        out
    }
    add(
        "LoKr, both full: alpha does not count",
        Kind::Lokr,
        &linear,
        file(&[("lokr_w1", &[4, 5]), ("lokr_w2", &[6, 4])], Some(7.0)),
        2.0,
        Box::new(|p, w, s| plus(w, s, 1.0, &kron(&p.matrix("lokr_w1"), &p.matrix("lokr_w2")))),
    );
    add(
        "LoKr, both factored",
        Kind::Lokr,
        &linear,
        file(
            &[("lokr_w1_a", &[4, 2]), ("lokr_w1_b", &[2, 5]), ("lokr_w2_a", &[6, 3]), ("lokr_w2_b", &[3, 4])],
            Some(1.5),
        ),
        8.0,
        Box::new(|p, w, s| {
            let [a, b] =
                [1, 2].map(|i| times(&p.matrix(&format!("lokr_w{i}_a")), &p.matrix(&format!("lokr_w{i}_b"))));
            plus(w, s, 0.5, &kron(&a, &b))
        }),
    );
    add(
        "LoKr, rank 1 is a rank",
        Kind::Lokr,
        &linear,
        file(&[("lokr_w1", &[4, 5]), ("lokr_w2_a", &[6, 1]), ("lokr_w2_b", &[1, 4])], Some(0.25)),
        8.0,
        Box::new(|p, w, s| {
            plus(
                w,
                s,
                0.25,
                &kron(&p.matrix("lokr_w1"), &times(&p.matrix("lokr_w2_a"), &p.matrix("lokr_w2_b"))),
            )
        }),
    );
    add(
        "LoKr of a convolution",
        Kind::Lokr,
        &conv,
        file(&[("lokr_w1_a", &[3, 2]), ("lokr_w1_b", &[2, 2]), ("lokr_w2", &[4, 3, 3, 3])], Some(1.0)),
        8.0,
        Box::new(|p, w, s| {
            plus(
                w,
                s,
                0.5,
                &kron(&times(&p.matrix("lokr_w1_a"), &p.matrix("lokr_w1_b")), &p.matrix("lokr_w2")),
            )
        }),
    );
    add(
        "LoKr with a core",
        Kind::Lokr,
        &conv,
        file(
            &[
                ("lokr_w1", &[3, 2]),
                ("lokr_w2_a", &[2, 4]),
                ("lokr_w2_b", &[2, 3]),
                ("lokr_t2", &[2, 2, 3, 3]),
            ],
            Some(1.0),
        ),
        8.0,
        Box::new(|p, w, s| {
            plus(
                w,
                s,
                0.5,
                &kron(
                    &p.matrix("lokr_w1"),
                    &p.tucker("lokr_t2", &p.matrix("lokr_w2_a"), &p.matrix("lokr_w2_b")),
                ),
            )
        }),
    );
    add(
        "whole weight",
        Kind::Diff,
        &conv,
        file(&[("diff", &[12, 6, 3, 3])], None),
        2.0,
        Box::new(|p, w, s| plus(w, s, 1.0, &p.matrix("diff").0)),
    );
    add(
        "norm",
        Kind::Diff,
        &[24],
        file(&[("w_norm", &[24])], None),
        2.0,
        Box::new(|p, w, s| plus(w, s, 1.0, &p.matrix("w_norm").0)),
    );
    add(
        "IA3 on outputs",
        Kind::Ia3,
        &linear,
        file(&[("weight", &[24])], None).number("lora_unet_m.on_input", 0.0),
        2.0,
        Box::new(|p, w, s| {
            w.iter().enumerate().map(|(i, w)| w * (1.0 + s * p.matrix("weight").0[i / 20])).collect()
        }),
    );
    add(
        "IA3 on inputs",
        Kind::Ia3,
        &conv,
        file(&[("weight", &[1, 6, 1, 1])], None).number("lora_unet_m.on_input", 1.0),
        2.0,
        Box::new(|p, w, s| {
            w.iter().enumerate().map(|(i, w)| w * (1.0 + s * p.matrix("weight").0[i / 9 % 6])).collect()
        }),
    );
    fn glora(
        p: &Parts,
        w: &[f64],
        s: f64,
        [a1, a2, b1, b2]: [Matrix; 4],
        inputs: usize,
        factor: f64,
    ) -> Vec<f64> {
        let _ = p;
        let (a, b) = (times(&a1, &a2), times(&b1, &b2));
        let (columns, kernel) = (b.2, b.2 / inputs);
        let delta: Vec<f64> = (0..w.len())
            .map(|at| {
                let (o, j, k) = (at / columns, at % columns / kernel, at % kernel);
                (0..inputs).map(|i| w[o * columns + i * kernel + k] * a.0[i * inputs + j]).sum::<f64>()
                    + b.0[at]
            })
            .collect();
        plus(w, s, factor, &delta)
    }
    let names = ["a1.weight", "a2.weight", "b1.weight", "b2.weight"];
    add(
        "GLoRA",
        Kind::Glora,
        &linear,
        file(
            &[
                ("a1.weight", &[20, 4]),
                ("a2.weight", &[4, 20]),
                ("b1.weight", &[24, 4]),
                ("b2.weight", &[4, 20]),
            ],
            Some(2.0),
        ),
        8.0,
        Box::new(move |p, w, s| glora(p, w, s, names.map(|n| p.matrix(n)), 20, 0.5)),
    );
    add(
        "GLoRA of a convolution",
        Kind::Glora,
        &conv,
        file(
            &[
                ("a1.weight", &[6, 2, 1, 1]),
                ("a2.weight", &[2, 6, 1, 1]),
                ("b1.weight", &[12, 2, 1, 1]),
                ("b2.weight", &[2, 6, 3, 3]),
            ],
            None,
        ),
        8.0,
        Box::new(move |p, w, s| glora(p, w, s, names.map(|n| p.matrix(n)), 6, 1.0)),
    );
    add(
        "GLoRA of the first LyCORIS",
        Kind::Glora,
        &linear,
        file(
            &[
                ("a1.weight", &[4, 20]),
                ("a2.weight", &[20, 4]),
                ("b1.weight", &[4, 20]),
                ("b2.weight", &[24, 4]),
            ],
            Some(2.0),
        ),
        8.0,
        Box::new(move |p, w, s| {
            let [a1, a2, b1, b2] = names.map(|n| p.matrix(n));
            glora(p, w, s, [a2, a1, b2, b1], 20, 0.5)
        }),
    );
    cases
}

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

/// Each kind after each other, in the order given, which matters for those that are not added.
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
        let resolution = file.open().unwrap().resolve(&target);
        assert!(resolution.report.applied[0].dora, "{name}");
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

/// The Cayley transform of a 2x2 block is known: B - Bᵀ = [[0, q], [-q, 0]] turns by the angle 2·atan(q).
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
                // (I + Q)(I - Q)⁻¹ is [[cos, sin], [-sin, cos]]; the rows are mixed by its transpose.
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

/// Any rows, from any type to any other, are those of the whole.
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
            let mut out = vec![0u8; count * to.size()];
            for range in [0..5, 5..6, 6..rows] {
                let [a, b] = [from, to]
                    .map(|t| range.start * count / rows * t.size()..range.end * count / rows * t.size());
                merge.rows(range, (from, &source[a]), (to, &mut out[b])).unwrap();
            }
            for (out, whole) in floats(to, &out).iter().zip(&expected) {
                // One rounding to the type apart, of sums whose order may differ by the height of a block.
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
