//! How much memory the container has that we run in.

use std::{fs, path::Path};

/// Limit in bytes of the control group that this process is in, the tightest of its ancestors' included; `None` without
/// a limit, or where there are no control groups.
pub(crate) fn memory_limit() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    limit(&groups, |path| fs::read_to_string(path).ok())
}

/// Version 2 is one line `0::<path>`; of version 1 the line of the controller `memory` counts. In a container of its own
/// the path may not be visible: its group is then the root.
fn limit(groups: &str, read: impl Fn(&Path) -> Option<String>) -> Option<u64> {
    let lines = groups.lines().filter_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        match controllers {
            "" => Some(("/sys/fs/cgroup", path, "memory.max")),
            _ if controllers.split(',').any(|name| name == "memory") => {
                Some(("/sys/fs/cgroup/memory", path, "memory.limit_in_bytes"))
            }
            _ => None,
        }
    });
    let limits = lines.flat_map(|(root, path, file)| {
        let own = Path::new(root).join(path.trim_start_matches('/'));
        let groups = own.ancestors().take_while(|group| group.starts_with(root)).map(Path::to_path_buf);
        groups.map(|group| group.join(file)).collect::<Vec<_>>()
    });
    // Version 1 says "no limit" by a number near 2^63.
    let set = limits.filter_map(|file| read(&file)?.trim().parse::<u64>().ok()).filter(|limit| *limit < 1 << 60);
    set.min()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(groups: &str, files: &[(&str, &str)]) -> Option<u64> {
        limit(groups, |path| files.iter().find(|(name, _)| Path::new(name) == path).map(|(_, text)| (*text).to_owned()))
    }

    #[test]
    fn r_mem_9_the_tightest_group_counts() {
        let pod = [
            ("/sys/fs/cgroup/kubepods/pod1/memory.max", "536870912\n"),
            ("/sys/fs/cgroup/kubepods/pod1/main/memory.max", "max\n"),
        ];
        assert_eq!(with("0::/kubepods/pod1/main\n", &pod), Some(512 << 20));
        assert_eq!(with("0::/\n", &[("/sys/fs/cgroup/memory.max", "268435456\n")]), Some(256 << 20));
        assert_eq!(with("0::/../..\n", &[("/sys/fs/cgroup/memory.max", "268435456\n")]), Some(256 << 20));
        assert_eq!(with("0::/\n", &[]), None);
    }

    #[test]
    fn r_mem_9_version_1_has_a_line_for_memory() {
        let groups = "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n";
        let file = "/sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes";
        assert_eq!(with(groups, &[(file, "1073741824\n")]), Some(1 << 30));
        assert_eq!(with(groups, &[(file, "9223372036854771712\n")]), None);
    }
}
