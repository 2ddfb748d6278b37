//! Tables stay in their file if they can.

use super::Bank;
use crate::{
    ffi::{Home, Type},
    form::Form,
    storage::to_bytes,
    tests::cpu,
};
use sdrun_abi::{DType, NoHost, Result, Weight, WeightSource, WeightSpec};
use std::{path::PathBuf, sync::Arc};

/// A table of f32, and the file that it claims to be stored in.
struct Table {
    values: Vec<f32>,
    file: Option<(PathBuf, u64)>,
}

impl Table {
    const ROWS: usize = 1 << 13;
    const SHAPE: [usize; 2] = [Self::ROWS, 80];

    fn new(first: f32) -> Self {
        Table { values: (0..Self::ROWS * 80).map(|i| first + i as f32).collect(), file: None }
    }

    /// Writes the table to a file, `skip` bytes after its start.
    fn in_file(mut self, path: PathBuf, skip: usize) -> Self {
        let bytes = [vec![0; skip], to_bytes(&self.values, Type::F32)].concat();
        std::fs::write(&path, bytes).unwrap();
        self.file = Some((path, skip as u64));
        self
    }

    fn bank(type_: Type) -> Bank {
        let spec = WeightSpec { name: "w".into(), dtype: DType::F32, shape: Self::SHAPE.into() };
        let mut bank = Bank::new(cpu(), &[spec], Arc::default());
        bank.place("w", Form::Plain, type_, Home::Host).unwrap();
        bank
    }
}

impl WeightSource for Table {
    fn get(&self, _: &str) -> Result<Weight<'_>> {
        let weight = Weight::new(DType::F32, Self::SHAPE.into(), to_bytes(&self.values, Type::F32))?;
        Ok(match self.file.clone() {
            Some((path, offset)) => weight.in_file(path, offset),
            None => weight,
        })
    }
}

fn contents(bank: &mut Bank) -> Vec<u8> {
    bank.store.rooms().unwrap()[0].copy()
}

#[test]
fn tables_stay_in_their_file_and_a_refit_does_not_change_it() {
    let folder = tempfile::tempdir().unwrap();
    // At the start of a page, inside a page, and beyond the first 64 KB.
    for skip in [0, 4, 70_000] {
        let path = folder.path().join("w.bin");
        let table = Table::new(1.0).in_file(path.clone(), skip);
        let mut bank = Table::bank(Type::F32);
        bank.load(&table, &NoHost, 2).unwrap();
        assert!(bank.store.mapped_bytes() >= (table.values.len() * 4) as u64);
        assert_eq!(contents(&mut bank), to_bytes(&table.values, Type::F32));

        let (before, other) = (std::fs::read(&path).unwrap(), Table::new(0.5));
        bank.replace(&["w"], &other, &NoHost, 2).unwrap();
        assert_eq!(contents(&mut bank), to_bytes(&other.values, Type::F32));
        assert_eq!(std::fs::read(&path).unwrap(), before);

        // The mapping stays valid after the file is deleted.
        let mut bank = Table::bank(Type::F32);
        bank.load(&table, &NoHost, 2).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(contents(&mut bank), to_bytes(&table.values, Type::F32));
    }
}

#[test]
fn tables_that_cannot_stay_in_a_file_are_copied() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let is = |what: &str, table: Table, type_: Type| {
        let mut bank = Table::bank(type_);
        bank.load(&table, &NoHost, 3).unwrap();
        assert_eq!(bank.store.mapped_bytes(), 0, "{what}");
        assert!(contents(&mut bank) == to_bytes(&table.values, type_), "{what}");
    };
    is("in memory", Table::new(1.0), Type::F32);
    is("of another type", Table::new(1.0).in_file(at("type"), 0), Type::Bf16);
    is("at an odd address", Table::new(1.0).in_file(at("odd"), 3), Type::F32);
    let moved = |file| Table { file: Some(file), ..Table::new(1.0) };
    is("in a file that is gone", moved((at("none"), 0)), Type::F32);
    is("in a folder", moved((folder.path().into(), 0)), Type::F32);
    drop(Table::new(1.0).in_file(at("short"), 0));
    is("in a file that is too short", moved((at("short"), 4)), Type::F32);
    is("beyond all files", moved((at("short"), u64::MAX - 3)), Type::F32);
    drop(Table::new(2.0).in_file(at("other"), 0));
    is("in another's file", moved((at("other"), 0)), Type::F32);
}
