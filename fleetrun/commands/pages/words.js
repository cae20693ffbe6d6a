// The texts of a page in the browser's language; what runs print stays as it is.
const CHINESE = {
  "running": "运行中", "its launcher was killed": "启动器被杀死", "all processes finished": "所有进程已完成",
  "{} (exit code {})": "{}（退出码 {}）", "duration": "时长", "processes": "进程", "hosts": "节点", "attempts": "尝试",
  "steps per second": "步/秒", "last loss": "最近 loss",
  "peak memory of a process": "单进程内存峰值", "Cause": "失败原因", "Its log": "其日志", "Its standard error": "其标准错误",
  "Loss": "Loss", "Steps": "Step",
  "{} (logarithmic)": "{}（对数）", "Processes": "进程",
  "Strategy": "策略", "field": "字段", "asked": "要求", "in effect": "实际", "why": "依据", "effective": "生效",
  "no difference": "无差别", "no effect": "未生效", "refused": "已拒绝", "script": "由脚本设置", "no word": "无证据",
  "Where it came from": "来源", "run": "运行", "command": "命令", "folder": "目录", "Logs": "日志", "What differs": "差异",
  "Loss of both": "两次运行的 loss", "Steps of both": "两次运行的 step", "succeeded": "成功", "failed first": "最先失败",
  "stopped with it": "随之停止", "end unknown": "结束情况未知", "CPU use": "CPU 使用率", "Memory": "内存",
  "GPU use": "GPU 利用率", "GPU memory": "显存", "Step time": "每步耗时", "Time in collectives": "集合通信耗时",
  "1 process": "1 个进程", "{} processes": "{} 个进程", "compare": "对比", "leave out": "取消对比",
  "There is no run yet.": "还没有运行记录。", "Ranks over time": "各 rank 随时间的变化",
  "not measured": "未测量",
  "Highest on average: {}; median {}.": "平均值最高：{}；中位数 {}。",
  "fleetrun ui does not answer: it has ended or was restarted.": "fleetrun ui 没有响应：它已结束，或已重新启动。",
};
const isChinese = navigator.language.startsWith("zh");

// TEXT with PARTS in place of its {}.
function say(text, ...parts) {
  const words = isChinese && Object.hasOwn(CHINESE, text) ? CHINESE[text] : text;
  return parts.reduce((filled, part) => filled.replace("{}", () => part), words);
}
