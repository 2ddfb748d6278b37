//! Filters that work on the rows of a picture and then on its columns.

/// Calls `change` with each row of `data`, then with each column.
pub(super) fn each_line<T: Copy>(data: &mut [T], width: usize, mut change: impl FnMut(&mut [T])) {
    if data.is_empty() || width == 0 {
        return;
    }
    data.chunks_exact_mut(width).for_each(&mut change);
    for x in 0..width {
        let mut column: Vec<T> = data.iter().skip(x).step_by(width).copied().collect();
        change(&mut column);
        data.iter_mut().skip(x).step_by(width).zip(column).for_each(|(out, value)| *out = value);
    }
}

/// The bytes of OpenCV's `GaussianBlur` with a kernel of these weights, which come from [`gaussian`].
pub(super) fn blur(line: &mut [u8], weights: &[i32]) {
    let (length, radius) = (line.len(), weights.len() / 2);
    let wide: Vec<i32> =
        (0..length + 2 * radius).map(|at| i32::from(line[reflected(at.abs_diff(radius), length)])).collect();
    for (out, window) in line.iter_mut().zip(wide.windows(weights.len())) {
        let sum: i32 = window.iter().zip(weights).map(|(value, weight)| value * weight).sum();
        *out = ((sum + 128) >> 8) as u8;
    }
}

/// Where to read for a place at or after the start of a line. The border is a mirror; it does not repeat the outermost pixel.
fn reflected(at: usize, length: usize) -> usize {
    let period = (2 * (length - 1)).max(1);
    let at = at % period;
    at.min(period - at).min(length - 1)
}

/// Weights of a Gaussian as OpenCV uses them for bytes: in 256ths, the rounding error of each passed on to the next from the
/// outside in, so that the sum is exactly 256.
pub(super) fn gaussian(sigma: f64, radius: usize) -> Vec<i32> {
    let exact: Vec<f64> =
        (0..=radius).rev().map(|x| (-((x * x) as f64) / (2.0 * sigma * sigma)).exp()).collect();
    let sum = 2.0 * exact[..radius].iter().sum::<f64>() + 1.0;
    let mut error = 0.0;
    let mut weights: Vec<i32> = exact[..radius]
        .iter()
        .map(|weight| {
            let value = weight / sum * 256.0 + error;
            let rounded = value.round_ties_even();
            error = value - rounded;
            rounded as i32
        })
        .collect();
    let centre = 256 - 2 * weights.iter().sum::<i32>();
    weights.push(centre);
    weights.extend_from_within(..radius);
    weights[radius + 1..].reverse();
    weights
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn rows_come_first() {
        let mut data = [1, 2, 3, 4, 5, 6];
        let mut lines = Vec::new();
        each_line(&mut data, 3, |line| {
            lines.push(line.to_vec());
            line.reverse();
        });
        assert_eq!(lines, [vec![1, 2, 3], vec![4, 5, 6], vec![3, 6], vec![2, 5], vec![1, 4]]);
        assert_eq!(data, [6, 5, 4, 3, 2, 1]);
    }

    #[test]
    fn borders_are_mirrors() {
        let places: Vec<usize> = (0..8).map(|at| reflected(at, 3)).collect();
        assert_eq!(places, [0, 1, 2, 1, 0, 1, 2, 1]);
        assert!((0..5).all(|at| reflected(at, 1) == 0));
    }

    proptest! {
        #[test]
        fn weights_are_a_share(sigma in 0.01f64..256.0) {
            let weights = gaussian(sigma, (2.5 * sigma + 0.5) as usize);
            prop_assert_eq!(weights.iter().sum::<i32>(), 256);
            prop_assert!(weights.iter().all(|weight| *weight >= 0));
            prop_assert!(weights.iter().eq(weights.iter().rev()));
        }
    }
}
