//! The parts of the documentation that a program can check: command lines, blocks of YAML, links.

#![allow(dead_code, clippy::unwrap_used, reason = "each test program uses a part of it")]

use std::fs;
use std::path::{Path, PathBuf};

/// A page of the repository.
pub(crate) struct Page {
    /// Its path.
    pub(crate) file: PathBuf,
    /// Its text.
    pub(crate) text: String,
}

/// A fenced code block.
struct Block {
    language: String,
    text: String,
}

/// README.md, CONTRIBUTING.md, SECURITY.md and all of docs/.
pub(crate) fn pages(root: &Path) -> Vec<Page> {
    let mut files = ["README.md", "CONTRIBUTING.md", "SECURITY.md"].map(|page| root.join(page)).to_vec();
    let mut folders = vec![root.join("docs")];
    while let Some(folder) = folders.pop() {
        for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|ending| ending == "md") {
                files.push(path);
            }
        }
    }
    files.sort();
    files.into_iter().map(|file| Page { text: fs::read_to_string(&file).unwrap(), file }).collect()
}

impl Page {
    /// Its folder and name, for messages.
    pub(crate) fn name(&self) -> String {
        let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        format!("{}/{}", self.file.parent().map(name).unwrap_or_default(), name(&self.file))
    }

    /// The blocks of YAML.
    pub(crate) fn yaml(&self) -> Vec<String> {
        self.blocks().into_iter().filter(|block| block.language == "yaml").map(|block| block.text).collect()
    }

    /// The arguments of every command line of `program`: in `sh` blocks and in inline code.
    pub(crate) fn commands(&self, program: &str) -> Vec<Vec<String>> {
        let shell = self.blocks().into_iter().filter(|block| block.language == "sh");
        let mut lines: Vec<String> = shell.flat_map(|block| block.text.lines().map(str::to_owned).collect::<Vec<_>>()).collect();
        lines.extend(self.spans());
        let start = format!("{program} ");
        let parts = lines.iter().flat_map(|line| line.split(" #").next().unwrap().split(['|', ';', '>', '&', '(']));
        let commands = parts.map(str::trim).filter(|part| part.starts_with(&start));
        commands.map(|command| command.split_whitespace().skip(1).map(str::to_owned).collect()).collect()
    }

    /// Links to other files and to headings, as written.
    pub(crate) fn links(&self) -> Vec<String> {
        let targets =
            self.prose().split("](").skip(1).filter_map(|rest| rest.split(')').next()).map(str::to_owned).collect::<Vec<_>>();
        targets.into_iter().filter(|target| !target.contains("://")).collect()
    }

    /// The anchors of its headings.
    pub(crate) fn anchors(&self) -> Vec<String> {
        let prose = self.prose();
        let titles =
            prose.lines().filter(|line| line.starts_with('#')).map(|line| line.trim_start_matches('#').trim().to_lowercase());
        let kept = |c: &char| c.is_alphanumeric() || "- _".contains(*c);
        titles.map(|title| title.chars().filter(kept).collect::<String>().replace(' ', "-")).collect()
    }

    /// Inline code. It may continue on the next line.
    fn spans(&self) -> Vec<String> {
        let prose = self.prose();
        prose.split('`').skip(1).step_by(2).map(|span| span.replace('\n', " ")).collect()
    }

    /// The page without its blocks.
    fn prose(&self) -> String {
        let mut inside = false;
        let mut text = String::new();
        for line in self.text.lines() {
            if line.trim_start().starts_with("```") {
                inside = !inside;
            } else if !inside {
                text.push_str(line);
                text.push('\n');
            }
        }
        text
    }

    fn blocks(&self) -> Vec<Block> {
        let mut blocks = Vec::new();
        let mut open: Option<Block> = None;
        for line in self.text.lines() {
            match (line.trim_start().strip_prefix("```"), &mut open) {
                (Some(language), None) => open = Some(Block { language: language.trim().to_owned(), text: String::new() }),
                (Some(_), Some(_)) => blocks.extend(open.take()),
                (None, Some(block)) => {
                    block.text.push_str(line);
                    block.text.push('\n');
                }
                (None, None) => {}
            }
        }
        blocks
    }
}
