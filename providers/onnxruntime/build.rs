//! Sets the build id (`SDRUN_BUILD_ID`).

#[path = "../common/build_id.rs"]
mod build_id;

fn main() {
    build_id::emit(&["src", "../common/src", "../../core/abi/src", "../../core/graph/src"]);
}
