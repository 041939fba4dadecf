//! Examples are short enough to be read in one go.

use std::path::Path;

#[test]
fn examples_are_short() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    let mut found = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            assert!(text.lines().count() < 150, "{}: {} lines", path.display(), text.lines().count());
            found += 1;
        }
    }
    assert!(found > 2, "{found} examples");
}

#[test]
fn the_shortest_program_has_forty_lines() {
    let text = include_str!("../../examples/udp_echo.rs");
    let code = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("//"));
    assert!((10..=40).contains(&code.count()));
}
