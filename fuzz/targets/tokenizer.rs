#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| (sdrun_fuzz::target("tokenizer").run)(bytes));
