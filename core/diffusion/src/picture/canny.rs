//! Canny's edge detector (1986), bit for bit as OpenCV computes it.

use image::{GrayImage, Luma, RgbImage};

/// A picture's brightness, with OpenCV's weights and rounding.
pub fn grey(picture: &RgbImage) -> GrayImage {
    GrayImage::from_fn(picture.width(), picture.height(), |x, y| {
        let [red, green, blue] = picture.get_pixel(x, y).0.map(u32::from);
        Luma([((9798 * red + 19235 * green + 3735 * blue + (1 << 14)) >> 15) as u8])
    })
}

/// What is known about a pixel.
#[derive(Clone, Copy, PartialEq)]
enum State {
    No,
    /// An edge if it touches one.
    Maybe,
    Edge,
}

/// Finds edges, which become 255; everything else becomes 0. This is OpenCV's `Canny` with its usual Sobel filters of 3 pixels.
/// A pixel's strength is the sum of both absolute slopes.
///
/// A pixel whose strength is above `high` and not below its neighbours' across the edge is an edge. So is one above `low` that
/// touches an edge.
pub fn canny(grey: &GrayImage, low: u16, high: u16) -> GrayImage {
    let (low, high) = (i32::from(low.min(high)), i32::from(low.max(high)));
    let (width, height) = (grey.width() as usize, grey.height() as usize);
    let slopes = slopes(grey);
    // With a border of one pixel, so that all neighbours exist.
    let stride = width + 2;
    let places = || (0..width * height).map(|i| (i, (i / width + 1) * stride + i % width + 1));
    let mut strength = vec![0; stride * (height + 2)];
    for (i, place) in places() {
        strength[place] = slopes[i].0.abs() + slopes[i].1.abs();
    }

    let mut states = vec![State::No; strength.len()];
    let mut edges = Vec::new();
    for (i, place) in places() {
        if strength[place] > low && is_ridge(&strength, place, stride, slopes[i]) {
            let strong = strength[place] > high;
            states[place] = if strong { State::Edge } else { State::Maybe };
            edges.extend(strong.then_some(place));
        }
    }
    while let Some(place) = edges.pop() {
        let rows = [place - stride, place, place + stride];
        for neighbour in rows.into_iter().flat_map(|row| row - 1..=row + 1) {
            if states[neighbour] == State::Maybe {
                states[neighbour] = State::Edge;
                edges.push(neighbour);
            }
        }
    }
    GrayImage::from_fn(grey.width(), grey.height(), |x, y| {
        let state = states[(y as usize + 1) * stride + x as usize + 1];
        Luma([if state == State::Edge { 255 } else { 0 }])
    })
}

/// The horizontal and vertical slope at each pixel. The border repeats the outermost pixel.
fn slopes(grey: &GrayImage) -> Vec<(i32, i32)> {
    let (width, height) = grey.dimensions();
    let slope = |x: u32, y: u32| {
        let (left, right) = (x.saturating_sub(1), (x + 1).min(width - 1));
        let (top, bottom) = (y.saturating_sub(1), (y + 1).min(height - 1));
        let at = |x, y| i32::from(grey.get_pixel(x, y).0[0]);
        let column = |x| at(x, top) + 2 * at(x, y) + at(x, bottom);
        let row = |y| at(left, y) + 2 * at(x, y) + at(right, y);
        (column(right) - column(left), row(bottom) - row(top))
    };
    (0..height).flat_map(|y| (0..width).map(move |x| (x, y))).map(|(x, y)| slope(x, y)).collect()
}

/// Whether a pixel is the strongest across the edge, whose direction is one of four. Of two equal ones in a row or column it
/// is the first, of two on a diagonal neither.
fn is_ridge(strength: &[i32], place: usize, stride: usize, (dx, dy): (i32, i32)) -> bool {
    /// The tangent of 22.5 degrees in 32768ths.
    const TANGENT: i32 = 13573;
    let here = strength[place];
    let (x, y) = (dx.abs(), dy.abs() << 15);
    if y < x * TANGENT {
        here > strength[place - 1] && here >= strength[place + 1]
    } else if y > x * (TANGENT + (2 << 15)) {
        here > strength[place - stride] && here >= strength[place + stride]
    } else if (dx < 0) != (dy < 0) {
        here > strength[place - stride + 1] && here > strength[place + stride - 1]
    } else {
        here > strength[place - stride - 1] && here > strength[place + stride + 1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::picture::reference::{REFERENCE, bytes};

    #[test]
    fn edges_are_those_of_opencv() {
        let mut seen = 0;
        for case in &REFERENCE.canny {
            let brightness = grey(&case.picture.rgb());
            assert_eq!(brightness.as_raw(), &bytes(&case.grey));
            for expected in &case.edges {
                let edges = canny(&brightness, expected.low, expected.high);
                let (low, high, size) = (expected.low, expected.high, brightness.dimensions());
                let expected: Vec<u8> = bytes(&expected.bits)
                    .iter()
                    .flat_map(|byte| (0..8).rev().map(move |bit| (byte >> bit & 1) * 255))
                    .take(edges.len())
                    .collect();
                assert_eq!(edges.as_raw(), &expected, "{size:?} from {low} to {high}");
                seen += expected.iter().filter(|value| **value > 0).count();
            }
        }
        assert!(seen > 1000, "{seen} pixels on edges test nothing");
    }

    #[test]
    fn the_order_of_the_limits_is_free() {
        let brightness = grey(&REFERENCE.canny[0].picture.rgb());
        assert_eq!(canny(&brightness, 200, 100), canny(&brightness, 100, 200));
        assert_eq!(canny(&GrayImage::new(0, 0), 1, 2), GrayImage::new(0, 0));
    }
}
