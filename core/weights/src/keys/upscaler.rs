//! ESRGAN's generator: the names of ESRGAN's first release (`RRDBNet` of `architecture.py`, a `Sequential` with numbered
//! parts), which most community models have, against those of Real-ESRGAN (`rrdbnet_arch.py` of BasicSR).

use super::{Naming, builder::Builder};

pub(super) fn esrgan(b: &mut Builder) {
    let (sub, body) = ("model.1.sub", "body");
    let blocks = match b.naming() {
        Naming::Diffusers => b.count(sub, body),
        // The convolution after the blocks is numbered as one more.
        Naming::Original => b.count(sub, body).saturating_sub(1),
    };
    b.module("model.0", "conv_first");
    for block in 0..blocks {
        for dense in 1..=3 {
            for conv in 1..=5 {
                b.module(
                    format!("{sub}.{block}.RDB{dense}.conv{conv}.0"),
                    format!("{body}.{block}.rdb{dense}.conv{conv}"),
                );
            }
        }
    }
    b.module(format!("{sub}.{blocks}"), "conv_body");
    // Enlargements and activations have the numbers between.
    for (place, name) in [(3, "conv_up1"), (6, "conv_up2"), (8, "conv_hr"), (10, "conv_last")] {
        b.module(format!("model.{place}"), name);
    }
}
