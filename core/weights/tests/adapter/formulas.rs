//! The kinds of modules with their formulas, in f64.

use crate::fixtures::File;
use sdrun_weights::adapter::Kind;

/// Values of a tensor, and the magnitudes for its error bound.
#[derive(Clone)]
pub(crate) struct Sum {
    pub(crate) value: Vec<f64>,
    pub(crate) size: Vec<f64>,
}

/// A matrix in f64.
pub(crate) type Matrix = (Vec<f64>, usize, usize);

pub(crate) fn times((a, m, k): &Matrix, (b, l, n): &Matrix) -> Matrix {
    assert_eq!(k, l);
    let mut out = vec![0.0; m * n];
    for i in 0..*m {
        for j in 0..*n {
            out[i * n + j] = (0..*k).map(|x| a[i * k + x] * b[x * n + j]).sum();
        }
    }
    (out, *m, *n)
}

/// The tensors of a module, either unchanged or all replaced by their magnitudes.
pub(crate) struct Parts<'a>(pub(crate) &'a File, pub(crate) bool);

impl Parts<'_> {
    pub(crate) fn matrix(&self, slot: &str) -> Matrix {
        let tensor = &self.0.tensors[&format!("lora_unet_m.{slot}")];
        let values: Vec<f64> = tensor.values.iter().map(|v| if self.1 { v.abs() } else { *v }).collect();
        let rows = tensor.shape[0];
        let columns = values.len() / rows;
        (values, rows, columns)
    }
    /// `[p, (r, kl)]` of `Σ_ij t[i,j,kl] · a[i,p] · b[j,r]`.
    pub(crate) fn tucker(&self, t: &str, a: &Matrix, b: &Matrix) -> Matrix {
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

pub(crate) fn transposed((a, m, n): Matrix) -> Matrix {
    ((0..n).flat_map(|j| (0..m).map(move |i| (i, j))).map(|(i, j)| a[i * n + j]).collect(), n, m)
}

/// The formula of a change: a function of tensors, weight and strength.
pub(crate) type Change = Box<dyn Fn(&Parts, &[f64], f64) -> Vec<f64>>;

/// A test case: the shape of the weight, the file, and the formula of the change.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    pub(crate) shape: Vec<usize>,
    pub(crate) file: File,
    /// Allowed error in units of 2⁻²³ · M.
    pub(crate) units: f64,
    pub(crate) change: Change,
}

/// W + s · factor · delta.
pub(crate) fn plus(w: &[f64], s: f64, factor: f64, delta: &[f64]) -> Vec<f64> {
    w.iter().zip(delta).map(|(w, d)| w + s * factor * d).collect()
}

pub(crate) fn file(tensors: &[(&str, &[usize])], alpha: Option<f64>) -> File {
    let file = tensors
        .iter()
        .fold(File::default(), |f, (slot, shape)| f.random(&format!("lora_unet_m.{slot}"), shape));
    alpha.into_iter().fold(file, |f, alpha| f.number("lora_unet_m.alpha", alpha))
}

pub(crate) fn cases() -> Vec<Case> {
    let (linear, conv) = (vec![24, 20], vec![12, 6, 3, 3]);
    let mut cases = Vec::new();
    let mut add = |name, kind, shape: &[usize], file, units, change: Change| {
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
