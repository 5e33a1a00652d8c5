//! No machine reads a clock: whoever drives it says what time it is, and it is the monotonic one (R-LSN-3).

use std::{fs, path::Path};

#[test]
fn r_lsn_3_no_machine_reads_a_clock() {
    let mut looked = 0;
    // A test's working directory is its package.
    look(Path::new("src"), &mut looked);
    assert!(looked > 10, "the machines are elsewhere");
}

fn look(directory: &Path, looked: &mut usize) {
    for entry in fs::read_dir(directory).expect("a directory") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            look(&path, looked);
        } else if path.file_name().is_some_and(|name| name != "tests.rs") {
            let text = fs::read_to_string(&path).expect("text");
            let machine = text.split("#[cfg(test)]").next().unwrap_or_default();
            let code = machine.lines().filter(|line| !line.trim_start().starts_with("//"));
            for line in code {
                assert!(!line.contains("::now()") && !line.contains("SystemTime"), "{}: {line}", path.display());
            }
            *looked += 1;
        }
    }
}
