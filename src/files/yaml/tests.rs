use super::*;
use proptest::prelude::*;
use serde::Deserialize;
use std::collections::BTreeMap;

#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct File {
    name: Option<String>,
    number: Option<f64>,
    small: Option<u8>,
    flag: Option<bool>,
    mode: Option<Mode>,
    #[serde(default)]
    list: Vec<Item>,
    #[serde(default)]
    map: BTreeMap<String, u32>,
    #[serde(default)]
    free: serde_json::Map<String, serde_json::Value>,
}

#[derive(Debug, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Mode {
    Fast,
    VerySlow,
}

#[derive(Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Item {
    id: u32,
    #[serde(default)]
    note: String,
}

fn problems_of(text: &str) -> Vec<String> {
    from_str::<File>(text).unwrap_err().iter().map(ToString::to_string).collect()
}

#[test]
fn values_are_deserialized_from_their_source_text() {
    let file: File = from_str(
        "# a comment\nname: 0815\nnumber: 3\nsmall: 7\nflag: true\nmode: very-slow\n\
         list: [{id: 1, note: off}, {id: 0x10}]\nmap: {'a.b/c': 2}\nfree: {a: [1, -2, 0.5, x, null, {b: off}]}\n",
    )
    .unwrap();
    assert_eq!(file.name.as_deref(), Some("0815"));
    assert_eq!((file.number, file.small, file.flag), (Some(3.0), Some(7), Some(true)));
    assert_eq!(file.mode, Some(Mode::VerySlow));
    assert_eq!(file.list, [Item { id: 1, note: "off".into() }, Item { id: 16, note: String::new() }]);
    assert_eq!(file.map["a.b/c"], 2);
    assert_eq!(serde_json::json!(file.free), serde_json::json!({"a": [1, -2, 0.5, "x", null, {"b": "off"}]}));
    for text in ["", "# nothing\n", "---\n", "{}", "list:\nmap:\nfree:\nname:\nmode: ~\n"] {
        assert_eq!(from_str::<File>(text).unwrap(), File::default(), "{text:?}");
    }
    for (name, text) in [
        ("123", "name: 123"),
        ("1.50", "name: 1.50"),
        ("true", "name: true"),
        ("a\nb\n", "name: |\n  a\n  b\n"),
    ] {
        assert_eq!(from_str::<File>(text).unwrap().name.as_deref(), Some(name));
    }
    let alias = "list: [&one {id: 1}, *one]\n";
    assert_eq!(from_str::<File>(alias).unwrap().list.len(), 2);
}

#[test]
fn all_problems_are_reported_with_their_positions() {
    let text = "nmae: x\n\
                number: fast\n\
                small: 300\n\
                flag: yes\n\
                mode: fats\n\
                list:\n\
                - id: 1\n\
                - note: x\n\
                - {id: -1}\n\
                - 7\n\
                - {id: 2, id: 3, nite: y}\n\
                map: {a: x, b: 1, b: 2}\n\
                free: {a: {b: 1, b: 2}}\n";
    assert_eq!(
        problems_of(text),
        [
            "line 1, column 1: the key \"nmae\" is not known; did you mean `name`?",
            "line 2, column 9: number: found \"fast\"; expected a number",
            "line 3, column 8: small: found 300; expected a whole number from 0 to 255",
            "line 4, column 7: flag: found \"yes\"; expected true or false",
            "line 5, column 7: mode: \"fats\" is not known; did you mean `fast`?",
            "line 8, column 3: list[1]: the key `id` is missing",
            "line 9, column 8: list[2].id: found -1; expected a whole number from 0 to 4294967295",
            "line 10, column 3: list[3]: found 7; expected a mapping with keys such as `id`, `note`",
            "line 11, column 11: list[4]: the key \"id\" is given twice, first in line 11",
            "line 11, column 18: list[4]: the key \"nite\" is not known; did you mean `note`?",
            "line 12, column 10: map.a: found \"x\"; expected a whole number from 0 to 4294967295",
            "line 12, column 19: map: the key \"b\" is given twice, first in line 12",
            "line 13, column 18: free.a: the key \"b\" is given twice, first in line 13",
        ]
    );
}

#[test]
fn fatal_errors_have_positions() {
    for (text, expected) in [
        ("a: [", "line "),
        ("a: b: c", "line 1"),
        ("- 1", "line 1, column 1: found a list; expected a mapping"),
        ("hello", "line 1, column 1: found \"hello\"; expected a mapping"),
        ("name: *none", "line 1"),
        ("a: 1\n---\nb: 2\n", "this is not YAML"),
        ("name: [a]", "line 1, column 7: name: found a list; expected text"),
        ("mode: [fast]", "mode: found a list; expected one of `fast`, `very-slow`"),
        ("number: .inf", "expected a number"),
        ("<<: {name: x}", "the key \"<<\" is not known"),
        ("name: \"a\\0b\"", "line 1, column 7: name: the text holds the control character '\\0'"),
        ("name: \"a\\x1bb\"", "the text holds the control character '\\u{1b}'"),
    ] {
        let message = from_str::<File>(text).unwrap_err().to_string();
        assert!(message.contains(expected), "{text}: {message}");
    }
}

#[test]
fn a_long_value_is_truncated_and_the_list_of_problems_is_limited() {
    let problems = problems_of(&format!("number: {}", "x".repeat(5000)));
    assert!(problems[0].len() < 200 && problems[0].contains("... (5000 bytes)"), "{problems:?}");
    let many: String = (0..200).map(|n| format!("key{n}: 1\n")).collect();
    let message = from_str::<File>(&many).unwrap_err().to_string();
    assert!(message.starts_with("50 or more errors\n  line 1, column 1: "), "{message}");
}

#[test]
fn aliases_and_depth_are_limited() {
    let mut bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
    for n in 1..12 {
        let items = vec![format!("*a{}", n - 1); 10].join(", ");
        bomb += &format!("a{n}: &a{n} [{items}]\n");
    }
    let deep = format!("free: {}{}", "{a: ".repeat(1000), "}".repeat(1000));
    for text in [bomb, deep] {
        let start = std::time::Instant::now();
        let message = from_str::<File>(&text).unwrap_err().to_string();
        assert!(message.contains("not YAML"), "{message}");
        assert!(start.elapsed().as_secs() < 5);
    }
}

#[test]
fn nearest_finds_a_name_with_a_typo() {
    let known = ["timeslice", "memory", "mixed", "exclusive"];
    for (name, expected) in [
        ("timeslize", Some("timeslice")),
        ("TimeSlice", Some("timeslice")),
        ("mxied", Some("mixed")),
        ("quota", None),
        ("", None),
    ] {
        assert_eq!(nearest(name, known), expected, "{name}");
    }
    assert_eq!(nearest(&"timeslice".repeat(1000), known), None);
}

#[test]
fn a_missing_key_has_the_position_of_its_innermost_parent() {
    let document = Document::parse("a:\n  b:\n  - {c: 1}\n'x.y/z': 1\n").unwrap();
    let located = |key: &str| document.locate(key.into(), String::new(), &LeftOut::default());
    let line = |key: &str| located(key).place.map(|place| place.line);
    assert_eq!(line("a.b[0].c"), Some(3));
    assert_eq!(line("a.b[0].d"), Some(3));
    assert_eq!(line("a.e"), Some(2));
    assert_eq!(line("[\"x.y/z\"]"), Some(4));
    assert_eq!(line("f"), None);
}

#[test]
fn an_item_after_one_that_was_left_out_keeps_its_index() {
    let document = Document::parse("list:\n- 7\n- {id: 1}\n- {id: x}\n- {id: 2}\n").unwrap();
    let ReadResult { value, problems, left_out } = document.read::<File>(LeftOut::default());
    assert_eq!(value.unwrap().list.iter().map(|item| item.id).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(problems.iter().map(|p| p.key.as_str()).collect::<Vec<_>>(), ["list[0]", "list[2].id"]);
    let second = document.locate("list[1].note".into(), "wrong".into(), &left_out);
    assert_eq!(second.to_string(), "line 5, column 3: list[3].note: wrong");
}

proptest! {
    #[test]
    fn any_text_is_parsed_or_refused_with_positions(
        text in "([a-z]{1,5}|[0-9]|: |- |\\n|  |[\\[\\]{},'\"&*|>#]|name: |list:|id: |free: ){0,40}",
    ) {
        if let Err(problems) = from_str::<File>(&text) {
            prop_assert!(!problems.is_empty());
            for problem in problems.iter() {
                prop_assert!(problem.place.is_some() && !problem.what.is_empty(), "{text:?}: {problem}");
            }
        }
    }
}

#[test]
fn scalars_have_their_paths() {
    let document = Document::parse("a: 0815\nb: [x, {c: off}]\nd: {'e/f': 1, g: {}}\nh: []\ni:\n").unwrap();
    let scalars = document.scalars();
    let scalars: Vec<_> = scalars.iter().map(|(path, text)| (path.as_str(), text.as_str())).collect();
    let expected =
        [("a", "0815"), ("b[0]", "x"), ("b[1].c", "off"), ("d.g", "{}"), ("d[\"e/f\"]", "1"), ("h", "[]")];
    assert_eq!(scalars, expected);
}

#[test]
fn a_configmap_that_was_pasted_whole_is_recognised_with_the_lines_to_cut() {
    let text = "apiVersion: v1\ndata:\n  config.yaml: |\n    name: n\n\n    list:\n      - id: 1\nkind: ConfigMap\n\
                metadata:\n  name: berth\n";
    let problems = problems_of(text);
    assert_eq!(
        problems,
        [
            "line 8, column 1: kind: this is a Kubernetes ConfigMap, and its key \"config.yaml\" is the file: cut line 3 and all \
          lines above it, all lines below line 7, and the indentation of the others: `sed -n '4,7{s/^    //;p}' FILE`"
        ]
    );
    // The command prints the file.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("map.yaml");
    std::fs::write(&path, text).unwrap();
    let output =
        std::process::Command::new("sed").args(["-n", "4,7{s/^    //;p}"]).arg(&path).output().unwrap();
    let file: File = from_str(&String::from_utf8(output.stdout).unwrap()).unwrap();
    assert_eq!((file.name.as_deref(), file.list.len()), (Some("n"), 1));

    for (text, expected) in [
        (
            "kind: ConfigMap\napiVersion: v1\ndata:\n  a.yaml: |-\n    name: n",
            "`sed -n '5,5{s/^    //;p}' FILE`",
        ),
        (
            "kind: ConfigMap\napiVersion: v1\ndata: {a.yaml: 'name: n'}",
            "the text of line 3 into a file of its own",
        ),
        ("kind: Secret\napiVersion: v1\nstringData:\n  a: |\n    name: n\n", "cut line 4 and"),
        ("kind: Secret\napiVersion: v1\ndata:\n  a: bmFtZTogbg==\n", "(kind: Secret), and not the file"),
        ("kind: ConfigMap\napiVersion: v1\n", "(kind: ConfigMap), and not the file"),
        ("kind: DaemonSet\napiVersion: apps/v1\nspec: {}\n", "(kind: DaemonSet), and not the file"),
    ] {
        let problems = problems_of(text);
        assert!(problems.len() == 1 && problems[0].contains(expected), "{text}: {problems:?}");
    }
}
